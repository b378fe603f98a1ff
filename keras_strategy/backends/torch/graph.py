"""What a model's forward pass sees while torch.compile makes a graph of it.

The graph is a function of the variables' values. It writes nothing: what it assigned,
and the losses that it added, are given back, and the replica assigns and adds them as
if they had come up just now. And it speaks to no other replica: what would, or what
each replica does in a way of its own, is refused here, and the forward pass is called
as it is.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.hooks import keras_scope
from keras_strategy.core.context import place
from keras_strategy.core.own_attributes import here
from keras_strategy.hooks.hook import of_several
from keras_strategy.rules.aggregation import is_on_read


class NotInGraph(Exception):
    """A graph cannot do this."""


class GraphScope(keras.StatelessScope):
    """The variables as the graph sees them.

    Args:
        values: What each variable holds, by `id`.

    Attributes:
        written: What was assigned, by `id`.
        added: The losses that layers added, with the layers.
        draws: How many masks were drawn.
    """

    def __init__(self, values: dict[int, torch.Tensor]):
        super().__init__(initialize_variables=False)
        self.values = values
        self.written: dict[int, torch.Tensor] = {}
        self.added: list[tuple[Any, Any]] = []
        self.draws = 0

    def get_current_value(self, variable: Any) -> torch.Tensor:
        value = self.values.get(id(variable))
        if value is None:
            raise NotInGraph("it reads a variable that is not the replica's own")
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if id(variable) not in self.values or variable.aggregation != "none":
            raise NotInGraph("it assigns a variable that replicas bring together")
        self.values[id(variable)] = self.written[id(variable)] = value.detach()


def may_be_read(variable: Any) -> bool:
    """Whether a graph may read a variable.

    What a step reads of sums is noted, and metrics are told of their rows.
    """
    return variable.aggregation != "sum" and not is_on_read(variable)


@of_several
def graph_here() -> GraphScope | None:
    """The graph that is made in this thread, or None."""
    scope = keras_scope()
    return scope if isinstance(scope, GraphScope) else None


class _Unknown:
    """A number that is another one for each replica, and in each step."""

    def _refuse(self, *_: Any) -> Any:
        raise NotInGraph("it asks a replica for its part of the rows")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__ = __radd__ = _refuse
    __bool__ = __float__ = __array__ = _refuse
    __hash__ = None  # pyright: ignore


class _Step:
    """A replica's step, of which a graph knows that it is one."""

    applying = True  # what is assigned is brought together when it is given back
    row_weight = _Unknown()
    drawing = False

    @property
    def rows(self) -> Any:
        """They tell which of one device's random numbers a replica's are."""
        raise NotInGraph("it draws one device's random numbers for a replica's rows")


class _Refuses:
    """What a graph has in the place of something that belongs to one replica."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch asks what kind of object it is
            raise AttributeError(name)
        raise NotInGraph(f"it asks a replica for `{name}`")


class _AnyReplica(_Refuses):
    """The replica that a graph is made for."""

    step = _Step()

    def dropout_mask(self, inputs: torch.Tensor, keep: float) -> torch.Tensor:
        """See `TorchReplica`."""
        scope = graph_here()
        assert scope is not None
        scope.draws += 1
        return _dropout_mask(inputs.detach(), keep, scope.draws)


class _AnyContext(_Refuses):
    """Its `ReplicaContext`."""

    _replica = _AnyReplica()
    _replicas = 2  # or more

    def __init__(self, strategy: Any):
        self.strategy = strategy


class _NobodysOwn(_Refuses):
    """What is set on layers while a graph is made of them: see `OwnAttributes`."""

    def set(self, layer: Any, name: str, value: Any) -> None:
        raise NotInGraph(f"it sets {type(layer).__name__}.{name}")

    def change(self, container: Any, values: Any) -> None:
        raise NotInGraph("it changes a list, dict or set of a layer")


class _AtWork(threading.local):
    """The replica that a graph is executed for, in this thread."""

    replica: Any = None


_at_work = _AtWork()
_nobodys_own: Any = _NobodysOwn()


class GraphPlace:
    """Where a thread is that makes or executes a graph.

    Args:
        strategy: The replicas' strategy.
    """

    def __init__(self, strategy: Any):
        self._context: Any = _AnyContext(strategy)

    @contextlib.contextmanager
    def entered(self, replica: Any) -> Iterator[None]:
        """Puts a replica's thread there."""
        context, own = place.replica, here.own
        place.replica, here.own = self._context, _nobodys_own
        _at_work.replica = replica
        # Keras would wrap each call in what looks for errors to explain.
        filters = keras.config.is_traceback_filtering_enabled()
        keras.config.disable_traceback_filtering()
        try:
            yield
        finally:
            if filters:
                keras.config.enable_traceback_filtering()
            place.replica, here.own = context, own
            _at_work.replica = None


@torch.library.custom_op("keras_strategy::dropout_mask", mutates_args=())
def _dropout_mask(inputs: torch.Tensor, keep: float, draw: int) -> torch.Tensor:
    """A mask that the replica draws when the graph is executed.

    Args:
        inputs: What it is for.
        keep: The part that is kept.
        draw: A number of its own, so that no two masks are taken for one.
    """
    return _at_work.replica.dropout_mask(inputs, keep)


@_dropout_mask.register_fake
def _mask_like(inputs: torch.Tensor, keep: float, draw: int) -> torch.Tensor:
    return torch.empty_like(inputs)
