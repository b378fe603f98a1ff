"""What a model's forward pass sees while torch.compile makes a graph of it.

The graph is a function of the variables' values. It writes nothing: what it assigned,
and the losses that it added, are given back, and the replica assigns and adds them as
if they had come up just now. And it speaks to no other replica: what would, or what
each replica does in a way of its own, is refused here, and the forward pass is called
as it is.

`jit_compile` on torch: the forward pass of a model as one graph of torch.compile.

Loss, backward pass, the sum of the gradients and the optimizer stay around it as they
are: they are where replicas speak to each other. A forward pass that is no graph is
called as it is, with the same numbers, and a warning says why.
"""

import contextlib
import functools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.backends.threads.patches import current_stateless_scope
from keras_strategy.core.context import distributed_replica, thread_state
from keras_strategy.core.per_replica_attributes import current_turn
from keras_strategy.keras_patches.layers import all_layers, seed_generators
from keras_strategy.keras_patches.losses_metrics import keras_masking
from keras_strategy.keras_patches.patch import of_several
from keras_strategy.keras_patches.random import keras_random
from keras_strategy.training import random
from keras_strategy.training.variable_sync import is_sync_on_read


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
            raise UnsupportedInGraph(
                "it reads a variable that is not the replica's own"
            )
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if id(variable) not in self.values or variable.aggregation != "none":
            raise UnsupportedInGraph(
                "it assigns a variable that replicas bring together"
            )
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
        if seed is None and shape is None and not random.settings.exact:
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
        raise UnsupportedInGraph(
            "it draws one device's random numbers for a replica's rows"
        )


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


logger = logging.getLogger("keras_strategy")
BACKEND = "KERAS_STRATEGY_TORCH_COMPILE_BACKEND"
INDUCTOR = "inductor"
# Of one forward pass on one device; torch's own limit.
_MOST_GRAPHS = 8
# What was said of each model: that of `fit` holds for `evaluate`, too.
_told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class CompiledModel:
    """The forward passes that a step of a model may call: its own, and its parts'.

    It is entered around the step; outside of it the model is as it was.

    Args:
        model: The model, with `jit_compile`.
        strategy: Its strategy.
    """

    def __init__(self, model: keras.Model, strategy: Any):
        self._model = model
        self._backend = _backend(strategy)
        parts = [layer for layer in all_layers(model) if isinstance(layer, keras.Model)]
        self._passes = [
            ForwardPass(part, strategy, self._backend)
            for part in {id(part): part for part in [model, *parts]}.values()
        ]
        self._told = 0

    def __enter__(self) -> None:
        for forward in self._passes:
            vars(forward.layer)["call"] = forward.called

    def __exit__(self, *error: Any) -> None:
        for forward in self._passes:
            forward.restore()
        happened = sum([forward.happened for forward in self._passes])
        if happened != self._told:
            self._told = happened
            self._tell()

    def _tell(self) -> None:
        """Says what became of `jit_compile`, where that is new."""
        graphs = [f"'{f.layer.name}'" for f in self._passes if f.has_graph]
        eager = [f"'{f.layer.name}' ({why})" for f in self._passes for why in f.refused]
        told = []
        if graphs:
            told.append(
                f"the forward pass of {' and of '.join(graphs)} is one graph of "
                f"torch.compile, backend '{self._backend}'"
            )
        if eager:
            told.append(
                f"without a graph, and with the same results: {'; '.join(eager)}"
            )
        line = "; ".join(told)
        known = _told.setdefault(self._model, set())
        if line not in known:
            known.add(line)
            logger.log(
                logging.WARNING if eager else logging.INFO,
                "jit_compile=True of the model '%s': %s.",
                self._model.name,
                line,
            )


class ForwardPass:
    """The `call` of a model, by a graph where there is one.

    Args:
        layer: The model.
        strategy: The strategy whose replicas call it.
        backend: What torch.compile makes of a graph.

    Attributes:
        called: What takes the place of the model's `call`.
        has_graph: Whether there is a graph.
        refused: Why it was called without one, in the order in which that came up.
        happened: How often the last two changed.
    """

    def __init__(self, layer: keras.Model, strategy: Any, backend: str):
        self.layer = layer
        self.has_graph = False
        self.refused: list[str] = []
        self.happened = 0
        self._own = vars(layer).get("call")
        self._plain = layer.call
        self._place = GraphTracing(strategy)
        self._is_built = False
        self._variables: list[Any] = []
        self._generators: list[Any] = []
        self._without: set[Any] = set()
        self._backend = backend
        self._most = _MOST_GRAPHS * len(strategy.extended.worker_devices)
        self._graph: Callable[..., Any] | None = None

        @functools.wraps(self._plain)
        def called(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._plain(*args, **kwargs)
            replica = distributed_replica()
            # Trials and replicas without rows make no graphs for their shapes.
            if replica is None or not replica.step.row_weight:
                return self._plain(*args, **kwargs)
            return self._call(replica, args, kwargs)

        self.called = called

    def restore(self) -> None:
        """Gives the model its own `call` back."""
        if self._own is None:
            vars(self.layer).pop("call", None)
        else:
            vars(self.layer)["call"] = self._own

    def _call(self, replica: Any, args: tuple, kwargs: dict) -> Any:
        if not self._is_ready() or (
            self._without and _kind(args, kwargs) in self._without
        ):
            return self._plain(*args, **kwargs)
        if _has_mask(args) or _has_mask(kwargs):
            return self._refuse("its inputs have masks", args, kwargs)
        values = list(map(replica.scope.get_current_value, self._variables))
        try:
            with self._place.entered(self._generators):
                assert self._graph is not None
                found = self._graph(values, args, kwargs)
        except Exception as error:
            # If it is the model's own, it is raised once more.
            return self._refuse(_why(error), args, kwargs)
        if not self.has_graph:
            self.has_graph = True
            self.happened += 1
        return self._given_back(*found)

    def _is_ready(self) -> bool:
        """Whether all is built, and the graph's function made."""
        if not self._is_built:
            self._is_built = all(layer.built for layer in all_layers(self.layer))
            if self._is_built:
                self._variables = [
                    v for v in self.layer.variables if is_graph_readable(v)
                ]
                self._generators = seed_generators(all_layers(self.layer))
                self._graph = torch.compile(  # pyright: ignore[reportCallIssue]
                    graph_function(self._plain, self._variables, self._generators),
                    fullgraph=True,
                    backend=self._backend,
                    # Its own processes hang in a process that was forked.
                    options={"compile_threads": 1} if self._backend == INDUCTOR else {},
                    recompile_limit=self._most,
                    isolate_recompiles=True,
                )
        return self._is_built

    def _refuse(self, why: str, args: tuple, kwargs: dict) -> Any:
        outputs = self._plain(*args, **kwargs)
        self._without.add(_kind(args, kwargs))
        if why not in self.refused:
            self.refused.append(why)
            self.happened += 1
        return outputs

    def _given_back(
        self,
        outputs: Any,
        masks: Sequence[Any],
        written: dict[int, torch.Tensor],
        added: Sequence[tuple[Any, Any]],
    ) -> Any:
        if written:
            for variable in self._variables:
                if id(variable) in written:
                    variable.assign(written[id(variable)])
        for layer, loss in added:
            layer.add_loss(loss)
        if any(mask is not None for mask in masks):
            for output, mask in zip(tree.flatten(outputs), masks, strict=True):
                keras_masking.set_keras_mask(output, mask)
        return outputs


def graph_function(
    call: Callable[..., Any], variables: Sequence[Any], generators: Sequence[Any]
) -> Callable[..., Any]:
    """The forward pass as a function of the variables' values.

    Args:
        call: The `call` of a model.
        variables: The variables.
        generators: The seed generators of the layers.

    Returns:
        A function of their values, and of the arguments of `call` as a tuple and a
        dict. It returns the outputs; their masks; what was assigned, by the `id` of
        the variable; and the losses that were added, with their layers.
    """
    numbers = {id(generator): number for number, generator in enumerate(generators)}

    def forward(values, args, kwargs):
        held = {}
        for variable, value in zip(variables, values):  # noqa: B905, is compiled
            held[id(variable)] = value
        scope = GraphScope(held, numbers)
        with scope:
            outputs = call(*args, **kwargs)
        masks = [keras_masking.get_keras_mask(x) for x in tree.flatten(outputs)]
        return outputs, masks, scope.written, scope.added

    return forward


def _backend(strategy: Any) -> str:
    """What torch.compile makes of graphs, unless the environment names it.

    On a CPU the graph itself, with torch's own kernels: nothing is rounded in another
    way, and no C++ compiler is needed.
    """
    on_cpu = all(":cpu:" in f":{d}".lower() for d in strategy.extended.worker_devices)
    return os.environ.get(BACKEND) or ("eager" if on_cpu else INDUCTOR)


def _kind(*parts: Any) -> Any:
    """What graphs are made for: the shapes, and what is no tensor."""
    return torch.is_grad_enabled(), tuple(map(_kind_of, parts))


def _kind_of(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, dict):
        return tuple((key, _kind_of(value)) for key, value in part.items())
    if isinstance(part, list | tuple):
        return tuple(map(_kind_of, part))
    return part if isinstance(part, bool | int | float | str) else type(part)


def _has_mask(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return keras_masking.get_keras_mask(part) is not None
    if isinstance(part, dict):
        return any(map(_has_mask, part.values()))
    return isinstance(part, list | tuple) and any(map(_has_mask, part))


def _why(error: Exception) -> str:
    """An error of torch.compile in a line: what it is, and in which `call`."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "inputs of further shapes: the limit of torch.compile is reached"
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    calls = [frame for frame in frames if frame[2] == "call"] or frames
    where = ""
    if calls:
        path, line, _ = calls[-1]
        where = f", from {path.split('site-packages/')[-1]}:{line}"
    error = getattr(error, "inner_exception", error)  # the backend's own
    text = str(error)
    raised = re.search(r"raised exception (.+)", text)
    reason = raised[1] if raised else text.strip().split("\n")[0]
    refused = re.search(r"UnsupportedInGraph\W+(it \w.*?)\W*$", reason)
    if refused:
        return f"{refused[1]}{where}"
    return f"{type(error).__name__}: {reason}{where}"
