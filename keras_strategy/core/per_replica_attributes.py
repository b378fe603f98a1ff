"""Attributes that replicas set on layers, kept separate until the run ends.

The replicas of a process share one Python model and run in turns. What a replica sets
on a layer (`self.skip = x`) is swapped out when its turn ends and swapped in when its
next turn begins. So a step reads what it wrote, and a counter (`self.steps += 1`) is
the same on every replica. Attributes are recorded when they are set; the contents of
the lists, dicts and sets that layers and metrics have are compared after each turn.
"""

import contextlib
import functools
import inspect
import operator
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np

from keras_strategy.core.step_state import override
from keras_strategy.values import PerReplica

ABSENT = object()
# Objects of these types are shared, whichever replica creates them.
_SHARED = (
    keras.Variable,
    keras.Layer,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)


def _refuse_use_as(what: str) -> Callable[..., NoReturn]:
    def refuse(self, *args, **kwargs):
        raise ValueError(
            f"The replicas have set {self.name} to different values, so it cannot be "
            f"used as {what} outside of them. Their strategy's "
            f"`experimental_local_results` returns each value. Received: {self!r}"
        )

    return refuse


class DifferingAttribute(PerReplica):
    """Value of an attribute that replicas have set to different values."""

    def __init__(self, values: Sequence[Any], name: str):
        super().__init__(values)
        self.name = name

    __bool__ = _refuse_use_as("a condition")
    __iter__ = _refuse_use_as("a sequence")
    __array__ = _refuse_use_as("an array")
    __float__ = _refuse_use_as("a number")


class _SetattrHooks:
    """Patches that intercept attribute assignment while replicas take turns."""

    # They stay installed after a turn, until `end`: the next one usually begins soon.

    def __init__(self):
        self.lock = threading.Lock()  # protects the other attributes
        self.turns = 0  # threads in a replica's turn
        self.installed = False
        # Classes, names of methods, and functions that wrap these.
        self._patches: list[tuple[type, str, Callable[[Any], Any]]] = []
        # Of each installed patch the class, the name, and what was there before and is
        # there now.
        self._replaced: list[tuple[type, str, Any, Any]] = []

    def add(self, cls: type, name: str, wrap: Callable[[Any], Any]) -> None:
        with self.lock:
            self._patches.append((cls, name, wrap))
            if self.installed:
                self._replace(cls, name, wrap)

    def put(self) -> None:
        """Install all patches; the caller holds the lock."""
        for patch in self._patches:
            self._replace(*patch)
        self.installed = True

    def _replace(self, cls: type, name: str, wrap: Callable[[Any], Any]) -> None:
        replacement = wrap(inspect.getattr_static(cls, name))
        before = vars(cls).get(name, ABSENT)
        self._replaced.append((cls, name, before, replacement))
        setattr(cls, name, replacement)

    def end(self) -> None:
        """Remove all patches, unless a thread is in a replica's turn."""
        with self.lock:
            if self.turns:
                return
            self.installed = False
            while self._replaced:
                cls, name, before, replacement = self._replaced.pop()
                if vars(cls)[name] is not replacement:
                    continue  # patched again by other code
                if before is ABSENT:
                    delattr(cls, name)
                else:
                    setattr(cls, name, before)


setattr_hooks = _SetattrHooks()


class _CurrentTurn(threading.local):
    attributes: "ReplicaAttributes | None" = None


current_turn = _CurrentTurn()


def current_attributes() -> "ReplicaAttributes | None":
    """Return the attributes of the replica whose turn it is in this thread."""
    return current_turn.attributes


# Context manager in which this thread sets attributes for all replicas.
set_on_all_replicas = functools.partial(override, current_turn, "attributes", None)


class _Attribute:
    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name
        self.description = f"{type(owner).__name__}.{name}"

    def read(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    def write(self, value: Any) -> None:
        # Not `setattr`: Keras and the backend saw the value when it was set.
        if value is ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = value


class _Trainable(_Attribute):
    """`trainable` of a variable, which may set an attribute of its tensor, too."""

    def read(self) -> Any:
        return self.owner.trainable

    def write(self, value: Any) -> None:
        self.owner.trainable = bool(value)


class ContainerContents:
    """Contents of a list, dict or set that Keras made of an attribute's value."""

    name = None
    description = "the contents of a list, dict or set of a layer or metric"

    def __init__(self, owner: Any):
        self.owner = owner
        kinds = (list, deque, set, OrderedDict, dict)
        self._kind: Any = next(kind for kind in kinds if isinstance(owner, kind))

    def read(self) -> Any:
        parts = _parts_of(self.owner)
        # Not `isinstance`, which raises for a dead weak reference.
        if parts and type(parts[-1]) is DifferingAttribute:
            return parts[-1]
        return self._kind(self.owner)

    def is_changed(self, before: Any) -> bool:
        """Return True if a replica has changed what `read` returned."""
        if isinstance(before, DifferingAttribute):
            return self.read() is not before
        old, new = _parts_of(before), _parts_of(self.owner)
        if len(old) == len(new) and all(map(operator.is_, old, new)):
            return False
        return not any(issubclass(type(part), _SHARED) for part in new)

    def write(self, value: Any) -> None:
        kind = self._kind
        if isinstance(value, DifferingAttribute):  # stands for all contents
            value = {"replicas": value} if issubclass(kind, dict) else kind([value])
        kind.clear(self.owner)
        if kind in (list, deque):
            kind.extend(self.owner, value)
        elif kind is set:
            set.update(self.owner, value)
        else:
            for key, part in value.items():
                kind.__setitem__(self.owner, key, part)


def _parts_of(container: Any) -> list[Any]:
    values = container.values() if isinstance(container, dict) else ()
    return [*container, *values]


@dataclass
class _Owner:
    """A layer or metric of a strategy, which may have lists, dicts and sets."""

    reference: weakref.ref
    strategy: weakref.ref
    count: int = 0  # of its attributes when the names were read
    names: tuple[str, ...] = ()  # of those that Keras does not set on every layer


# By the owner's `id`, since it may be unhashable.
_owners: dict[int, _Owner] = {}


@functools.cache
def _keras_attributes() -> frozenset[str]:
    """Return the names of attributes that Keras sets on any layer or model."""
    inputs = keras.Input((1,), name="input")
    layer = keras.layers.Identity(name="identity")
    functional = keras.Model(inputs, layer(inputs), name="functional")
    sequential = keras.Sequential([layer], name="sequential")
    return frozenset().union(*map(vars, (layer, functional, sequential)))


def note_owner(owner: Any, strategy: Any) -> None:
    """Record a layer or metric of a strategy."""
    key = id(owner)
    reference = weakref.ref(owner, lambda _: _owners.pop(key, None))
    _owners[key] = _Owner(reference, weakref.ref(strategy))


def _find_containers(strategy: Any) -> list[ContainerContents]:
    """Return those of a strategy's layers and metrics; of all if it is None."""
    # In each run, so without a call for each owner.
    values: list[Any] = []
    for noted in list(_owners.values()):  # another thread may add one
        owner = noted.reference()
        if owner is None or strategy not in (None, noted.strategy()):
            continue
        attributes = vars(owner)
        if len(attributes) != noted.count or not attributes.keys() >= set(noted.names):
            noted.count = len(attributes)
            noted.names = tuple(attributes.keys() - _keras_attributes())
        for name in noted.names:
            # Not `isinstance`, which raises for a dead weak reference.
            if issubclass(type(attributes[name]), (list, dict, set)):
                values.append(attributes[name])
    found: list[ContainerContents] = []
    while values:
        value = values.pop()
        if issubclass(type(value), (list, dict, set)) and hasattr(value, "tracker"):
            found.append(ContainerContents(value))
            values += value.values() if isinstance(value, dict) else value
    return found


def _find_place(owner: Any, name: str | None) -> _Attribute | ContainerContents:
    if name is None:
        return ContainerContents(owner)
    return (_Trainable if isinstance(owner, keras.Variable) else _Attribute)(
        owner, name
    )


class ReplicaAttributes:
    """Attributes that one replica sets on layers during a run."""

    def __init__(
        self, new_layers: dict[int, Any], containers: Sequence[ContainerContents] = ()
    ):
        self.new_layers = new_layers  # those that replicas created in this run
        self._containers = containers
        # The contents of each container when the turn began.
        self._contents: list[Any] = []
        # Each place, and its value when the turn changes.
        self.swapped: dict[Hashable, tuple[_Attribute | ContainerContents, Any]] = {}
        self._in_place = False

    def set(self, layer: Any, name: str, value: Any) -> None:
        """Record that an attribute is about to change; `value` may be ABSENT."""
        key = id(layer), name
        if isinstance(value, _SHARED):
            self.swapped.pop(key, None)
        elif key not in self.swapped and id(layer) not in self.new_layers:
            place = _find_place(layer, name)
            self.swapped[key] = place, place.read()

    def keep(self, container: Any) -> None:
        """Record that the contents of a list, dict or set are about to change."""
        if id(container) not in self.swapped:
            place = ContainerContents(container)
            self.swapped[id(container)] = place, place.read()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    def swap_in(self) -> None:
        """Begin a turn."""
        with setattr_hooks.lock:  # hot path: avoid calls
            setattr_hooks.turns += 1
            if not setattr_hooks.installed:
                setattr_hooks.put()
        current_turn.attributes = self
        self._in_place = True
        if self.swapped:
            self._swap()
        if self._containers:
            self._contents = [place.read() for place in self._containers]

    def swap_out(self) -> None:
        """End a turn, unless an error has ended it."""
        current_turn.attributes = None
        if self._in_place:
            self._in_place = False
            with setattr_hooks.lock:
                setattr_hooks.turns -= 1
            for place, before in zip(self._containers, self._contents, strict=True):
                key = id(place.owner)
                if key not in self.swapped and place.is_changed(before):
                    self.swapped[key] = place, before
            if self.swapped:
                self._swap()

    def _swap(self) -> None:
        for key, (place, value) in self.swapped.items():
            self.swapped[key] = place, place.read()
            place.write(value)


@contextlib.contextmanager
def discard_attribute_changes() -> Iterator[None]:
    """Discard what this thread sets on layers, for dry runs."""
    attributes = ReplicaAttributes({}, _find_containers(None))
    with set_on_all_replicas(), attributes.in_turn():
        yield


class GroupAttributes:
    """Attributes that a group's local replicas set on layers, from run to run."""

    def __init__(self, strategy: Any, replicas: int, is_tensor: Callable[[Any], bool]):
        self._strategy, self._replicas = strategy, replicas
        self._is_tensor = is_tensor
        self._differing: list[tuple[weakref.ref, str | None]] = []

    def begin(self) -> list[ReplicaAttributes]:
        """Begin a run: each replica gets the values it left."""
        new_layers: dict[int, Any] = {}
        containers = _find_containers(self._strategy)
        replicas = [
            ReplicaAttributes(new_layers, containers) for _ in range(self._replicas)
        ]
        for reference, name in self._differing:
            owner = reference()
            if owner is None:
                continue
            key = id(owner) if name is None else (id(owner), name)
            place = _find_place(owner, name)
            value = place.read()
            if isinstance(value, DifferingAttribute):  # not overwritten since
                for replica, local in zip(replicas, value.values, strict=True):
                    replica.swapped[key] = place, local
        return replicas

    def commit(self, replicas: Sequence[ReplicaAttributes]) -> None:
        """Write what the replicas have set, once all of them have succeeded."""
        self._differing = []
        places = {key: x for replica in replicas for key, x in replica.swapped.items()}
        for key, (place, _) in places.items():
            current = place, place.read()
            values = [replica.swapped.get(key, current)[1] for replica in replicas]
            if all(self._same(values[0], value) for value in values[1:]):
                place.write(values[0])
            else:
                place.write(DifferingAttribute(values, place.description))
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
