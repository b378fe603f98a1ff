"""What a model's forward pass sees while torch.compile makes a graph of it.

The graph is a function of the variables' values. It writes nothing: what it assigned,
and the losses that it added, are given back, and the replica assigns and adds them as
if they had come up just now. And it speaks to no other replica: what would, or what
each replica does in a way of its own, is refused here, and the forward pass is called
as it is.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.hooks import current_stateless_scope
from keras_strategy.core.context import thread_state
from keras_strategy.core.own_attributes import current_turn
from keras_strategy.hooks.draws import keras_random
from keras_strategy.hooks.hook import of_several
from keras_strategy.rules import draws
from keras_strategy.rules.aggregation import is_sync_on_read


class UnsupportedInGraph(Exception):
    """A graph cannot do this."""


class GraphScope(keras.StatelessScope):
    """The variables as the graph sees them.

    Args:
        values: What each variable holds, by `id`.
        generators: The numbers of the layers' seed generators, by `id`.

    Attributes:
        written: What was assigned, by `id`.
        added: The losses that layers added, with the layers.
    """

    def __init__(self, values: dict[int, torch.Tensor], generators: dict[int, int]):
        super().__init__(initialize_variables=False)
        self.values = values
        self.written: dict[int, torch.Tensor] = {}
        self.added: list[tuple[Any, Any]] = []
        self._generators = generators
        self._drawn: dict[int, torch.Tensor] = {}
        self._draws = 0

    def get_current_value(self, variable: Any) -> torch.Tensor:
        value = self.values.get(id(variable))
        if value is None:
            raise UnsupportedInGraph("it reads a variable that is not the replica's own")
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if id(variable) not in self.values or variable.aggregation != "none":
            raise UnsupportedInGraph("it assigns a variable that replicas bring together")
        self.values[id(variable)] = self.written[id(variable)] = value.detach()

    def dropped(
        self,
        inputs: torch.Tensor,
        rate: float,
        noise_shape: Sequence[int | None] | None,
        seed: Any,
    ) -> torch.Tensor:
        """What dropout leaves of a tensor; the arguments are those of Keras's."""
        number = -1 if seed is None else self._generators.get(id(seed))
        if number is None:
            raise UnsupportedInGraph("it draws from a seed that is none of its layers'")
        shape = None
        if noise_shape is not None:
            shape = [-1 if size is None else size for size in noise_shape]
        # One generator draws in one order, and no two masks are taken for one.
        before = self._drawn.get(number)
        self._draws += 1
        scales = _scales(inputs.detach(), rate, shape, number, before, self._draws)
        self._drawn[number] = scales
        if seed is None and shape is None and not draws.settings.exact:
            return inputs * scales  # as the replica does it without a graph
        return torch.where(scales != 0, inputs / (1.0 - rate), 0)


def is_graph_readable(variable: Any) -> bool:
    """Whether a graph may read a variable.

    What a step reads of sums is noted, and metrics are told of their rows.
    """
    return variable.aggregation != "sum" and not is_sync_on_read(variable)


@of_several
def current_graph() -> GraphScope | None:
    """The graph that is made in this thread, or None."""
    scope = current_stateless_scope()
    return scope if isinstance(scope, GraphScope) else None


class _Unknown:
    """A number that is another one for each replica, and in each step."""

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedInGraph("it asks a replica for its part of the rows")

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
        raise UnsupportedInGraph("it draws one device's random numbers for a replica's rows")


class _Refuses:
    """What a graph has in the place of something that belongs to one replica."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch asks what kind of object it is
            raise AttributeError(name)
        raise UnsupportedInGraph(f"it asks a replica for `{name}`")


class _AnyReplica(_Refuses):
    """The replica that a graph is made for."""

    step = _Step()


class _AnyContext(_Refuses):
    """Its `ReplicaContext`."""

    _replica = _AnyReplica()
    _replicas = 2  # or more

    def __init__(self, strategy: Any):
        self.strategy = strategy


class _NobodysOwn(_Refuses):
    """What is set on layers while a graph is made of them: see `OwnAttributes`."""

    def set(self, layer: Any, name: str, value: Any) -> None:
        raise UnsupportedInGraph(f"it sets {type(layer).__name__}.{name}")

    def change(self, container: Any, values: Any) -> None:
        raise UnsupportedInGraph("it changes a list, dict or set of a layer")


class _AtWork(threading.local):
    """What a graph is executed for, in this thread.

    Attributes:
        around: Where the thread was, and whose attributes it set.
        generators: The layers' seed generators.
    """

    around: tuple[Any, Any] = (None, None)
    generators: Sequence[Any] = ()


_at_work = _AtWork()
_nobodys_own: Any = _NobodysOwn()


class GraphTracing:
    """Where a thread is that makes or executes a graph.

    Args:
        strategy: The replicas' strategy.
    """

    def __init__(self, strategy: Any):
        self._context: Any = _AnyContext(strategy)

    @contextlib.contextmanager
    def entered(self, generators: Sequence[Any]) -> Iterator[None]:
        """Puts a replica's thread there.

        Args:
            generators: The layers' seed generators.
        """
        around = thread_state.replica, current_turn.attributes
        _at_work.around, _at_work.generators = around, generators
        thread_state.replica, current_turn.attributes = self._context, _nobodys_own
        # Keras would wrap each call in what looks for errors to explain.
        filters = keras.config.is_traceback_filtering_enabled()
        keras.config.disable_traceback_filtering()
        try:
            yield
        finally:
            if filters:
                keras.config.enable_traceback_filtering()
            thread_state.replica, current_turn.attributes = around
            del _at_work.around, _at_work.generators


@contextlib.contextmanager
def _without_graph() -> Iterator[None]:
    """Puts the thread back to where it was."""
    in_graph = thread_state.replica, current_turn.attributes
    thread_state.replica, current_turn.attributes = _at_work.around
    try:
        yield
    finally:
        thread_state.replica, current_turn.attributes = in_graph


@torch.library.custom_op("keras_strategy::scales", mutates_args=())
def _scales(
    inputs: torch.Tensor,
    rate: float,
    noise_shape: Sequence[int] | None,
    generator: int,
    before: torch.Tensor | None,
    draw: int,
) -> torch.Tensor:
    """What dropout makes of ones, drawn by the replica when the graph is executed.

    Args:
        inputs: What it is for.
        rate: The part that is dropped.
        noise_shape: See `keras.random.dropout`; -1 where that is None.
        generator: The number of the seed generator; -1 for the process's.
        before: What the same generator drew before, so that it draws in that order.
        draw: A number of its own, so that no two draws are taken for one.
    """
    shape = None
    if noise_shape is not None:
        shape = [None if size == -1 else size for size in noise_shape]
    seed = None if generator == -1 else _at_work.generators[generator]
    with _without_graph():
        return keras_random.dropout(torch.ones_like(inputs), rate, shape, seed)


@_scales.register_fake
def _like_inputs(inputs, rate, noise_shape, generator, before, draw) -> torch.Tensor:
    return torch.empty_like(inputs)
