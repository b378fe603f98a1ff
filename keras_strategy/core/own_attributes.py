"""What replicas set on layers, kept apart.

The replicas of a process share one Python model, and run in turns. What one of them
sets on a layer (`self.skip = x`) is its own until the run ends: it is set aside when a
turn ends, and put back when the replica's next one begins. So a step reads what it
wrote, and what it counts (`self.steps += 1`) starts from one number on every replica.
"""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategy.values.distributed import PerReplica

ABSENT = object()
# What a replica makes of these is there for all of them.
_SHARED = (
    keras.Variable,
    keras.Layer,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)


class OwnValues(PerReplica):
    """What an attribute became that replicas set to different values.

    Args:
        values: The values, in the order of the replicas.
        name: The attribute's name.
    """

    def __init__(self, values: Sequence[Any], name: str):
        super().__init__(values)
        self.name = name

    def __bool__(self) -> bool:
        raise self._used("neither true nor false")

    def __iter__(self) -> Any:
        raise self._used("no sequence")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._used("no array")

    def __float__(self) -> float:
        raise self._used("no number")

    def _used(self, what: str) -> ValueError:
        return ValueError(
            f"The replicas have set {self.name} to different values, so that it is "
            f"{what} outside of them. `experimental_local_results` of their strategy "
            f"gives each one's. Received: {self!r}"
        )


class _Notice:
    """What notices that an attribute is set: it is there while replicas take turns.

    And stays when they end, since the next ones begin soon, until `end` is called.

    Attributes:
        lock: Held by who changes the others.
        turns: How many threads are in a replica's turn.
        there: Whether it is there.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.turns = 0
        self.there = False
        self._pairs: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def add(self, put: Callable[[], None], take: Callable[[], None]) -> None:
        """Has something put in place before a turn begins, and taken away at the end.

        Args:
            put: Called without arguments.
            take: Called without arguments.
        """
        with self.lock:
            self._pairs.append((put, take))
            if self.there:
                put()

    def put(self) -> None:
        """Puts all in place, for who holds the lock."""
        for put, _ in self._pairs:
            put()
        self.there = True

    def end(self) -> None:
        """Takes all away, unless some thread is in a replica's turn."""
        with self.lock:
            if self.there and not self.turns:
                for _, take in self._pairs:
                    take()
                self.there = False


notice = _Notice()


class _Here(threading.local):
    """Whose turn it is in this thread."""

    own: "OwnAttributes | None" = None


here = _Here()


def whose_turn() -> "OwnAttributes | None":
    """The replica whose turn it is in this thread, or None."""
    return here.own


@contextlib.contextmanager
def set_for_all() -> Iterator[None]:
    """Lets this thread set attributes for all replicas."""
    own, here.own = here.own, None
    try:
        yield
    finally:
        here.own = own


class _Attribute:
    """An attribute of a layer.

    Args:
        owner: The layer.
        name: The attribute's name.
    """

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name
        self.told = f"{type(owner).__name__}.{name}"

    def read(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        # Not by `setattr`: Keras and the engine have seen the value when it was set.
        if value is ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = value


class _Contents:
    """What is in a list, dict or set that Keras made of an attribute's value.

    Args:
        owner: The list, dict or set.
    """

    name = None
    told = "what is in a list, dict or set of a layer or metric"

    def __init__(self, owner: Any):
        self.owner = owner
        kinds = (list, set, OrderedDict, dict)
        self._kind: Any = next(kind for kind in kinds if isinstance(owner, kind))

    def read(self) -> Any:
        parts = list(self._parts(self.owner))
        if len(parts) == 1 and isinstance(parts[0], OwnValues):
            return parts[0]
        return self._kind(self.owner)

    def write(self, value: Any) -> None:
        kind = self._kind
        if isinstance(value, OwnValues):  # in the place of all of it
            value = {"replicas": value} if issubclass(kind, dict) else kind([value])
        kind.clear(self.owner)
        if kind is list:
            list.extend(self.owner, value)
        elif kind is set:
            set.update(self.owner, value)
        else:
            for key, part in value.items():
                kind.__setitem__(self.owner, key, part)

    def _parts(self, contents: Any) -> Any:
        return contents.values() if isinstance(contents, dict) else contents


_Place = _Attribute | _Contents


class OwnAttributes:
    """What one replica sets on layers during a run.

    Args:
        made: The layers that replicas have made in this run.
    """

    def __init__(self, made: dict[int, Any]):
        self.made = made
        # Each place, and what will be in it when the turn changes.
        self.aside: dict[Hashable, tuple[_Place, Any]] = {}
        self._in_place = False

    def set(self, layer: Any, name: str, value: Any) -> None:
        """Notes that an attribute is about to change, or to be deleted.

        Args:
            layer: The layer.
            name: The attribute's name.
            value: What it becomes, or ABSENT.
        """
        key = id(layer), name
        if isinstance(value, _SHARED):
            self.aside.pop(key, None)
        elif key not in self.aside and id(layer) not in self.made:
            place = _Attribute(layer, name)
            self.aside[key] = place, place.read()

    def change(self, container: Any, values: Sequence[Any]) -> None:
        """Notes that what is in a list, dict or set is about to change.

        Args:
            container: The list, dict or set.
            values: What comes into it, among others.
        """
        shared = any(isinstance(value, _SHARED) for value in values)
        if not shared and id(container) not in self.aside:
            place = _Contents(container)
            self.aside[id(container)] = place, place.read()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Surrounds all that the replica does."""
        self.put_back()
        try:
            yield
        finally:
            self.set_aside()

    def put_back(self) -> None:
        """Begins a turn."""
        with notice.lock:  # each turn of each step: no function is called here
            notice.turns += 1
            if not notice.there:
                notice.put()
        here.own = self
        self._in_place = True
        if self.aside:
            self._swap()

    def set_aside(self) -> None:
        """Ends a turn; also one that has ended already, by an error."""
        here.own = None
        if self._in_place:
            self._in_place = False
            with notice.lock:
                notice.turns -= 1
            if self.aside:
                self._swap()

    def keep(self) -> None:
        """Ends the only turn of a replica that has none beside it."""
        here.own = None
        self._in_place = False
        with notice.lock:
            notice.turns -= 1
        self.aside.clear()

    def _swap(self) -> None:
        for key, (place, value) in self.aside.items():
            self.aside[key] = place, place.read()
            place.write(value)


@contextlib.contextmanager
def set_for_nobody() -> Iterator[None]:
    """Forgets what this thread sets on layers while it only looks at what they do."""
    own = here.own
    try:
        with OwnAttributes({}).in_turn():
            yield
    finally:
        here.own = own


class AttributesOfReplicas:
    """What the replicas of a group set on layers, from run to run.

    Args:
        replicas: The number of replicas on this worker.
        is_tensor: Tells the tensors of the backend in use.
    """

    def __init__(self, replicas: int, is_tensor: Callable[[Any], bool]):
        self._replicas = replicas
        self._is_tensor = is_tensor
        self._differing: list[tuple[weakref.ref, str | None]] = []

    def begin(self) -> list[OwnAttributes]:
        """Begins a run: each replica finds what it left behind."""
        made: dict[int, Any] = {}
        replicas = [OwnAttributes(made) for _ in range(self._replicas)]
        for reference, name in self._differing:
            owner = reference()
            if owner is None:
                continue
            place = _Contents(owner) if name is None else _Attribute(owner, name)
            found = place.read()
            if not isinstance(found, OwnValues):  # somebody wrote to it
                continue
            key = id(owner) if name is None else (id(owner), name)
            for replica, value in zip(replicas, found.values, strict=True):
                replica.aside[key] = place, value
        return replicas

    def commit(self, replicas: Sequence[OwnAttributes]) -> None:
        """Writes what the replicas have set, when all of them have succeeded."""
        places = {
            key: place for own in replicas for key, (place, _) in own.aside.items()
        }
        self._differing = []
        for key, place in places.items():
            kept = place.read()
            first, *others = [own.aside.get(key, (place, kept))[1] for own in replicas]
            if all(self._same(first, other) for other in others):
                place.write(first)
            else:
                place.write(OwnValues([first, *others], place.told))
                self._differing.append((weakref.ref(place.owner), place.name))

    def _same(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if type(a) is not type(b) or self._is_tensor(a):
            return False
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(self._same(a[k], b[k]) for k in a)
        if isinstance(a, list | tuple):
            pairs = zip(a, b, strict=False)
            return len(a) == len(b) and all(self._same(x, y) for x, y in pairs)
        if isinstance(a, np.ndarray):
            return np.array_equal(a, b)
        return bool(a == b)
