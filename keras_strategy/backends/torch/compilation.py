"""`jit_compile` on torch: forward pass, loss and metrics as a graph of torch.compile.

If the loss or a metric cannot be compiled, the graph is the forward pass. What cannot
be compiled is called eagerly, with the same results, and a warning reports why. The
gradient all-reduce and the optimizer are not compiled: their kernels are few.

The graph is a function of the variables' values and writes nothing. It returns what was
assigned and the losses that were added, and the replica then assigns and adds them. It
cannot communicate with other replicas or depend on the replica, except for the row
weight of a step: that is refused while the graph is traced.
"""

import contextlib
import functools
import logging
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.core.context import distributed_replica, thread_state
from keras_strategy.core.per_replica_attributes import current_turn
from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.layers import all_layers, seed_generators
from keras_strategy.keras_patches.losses_metrics import (
    compute_loss,
    keras_masking,
    update_metrics,
)
from keras_strategy.keras_patches.patch import multi_replica_only
from keras_strategy.keras_patches.random import keras_random
from keras_strategy.training import random
from keras_strategy.training.variable_sync import aggregate_assignment, is_sync_on_read


class UnsupportedInGraph(Exception):
    """An operation that a graph cannot contain."""


class GraphScope(keras.StatelessScope):
    """The variables as the graph reads and writes them, by `id`."""

    def __init__(
        self,
        values: dict[int, torch.Tensor],
        generators: dict[int, int],
        row_weight: torch.Tensor | None,
    ):
        super().__init__(initialize_variables=False)
        self.values = values
        self.row_weight = row_weight  # None in a forward pass alone
        self.written: dict[int, torch.Tensor] = {}  # what was assigned
        self.losses: list[tuple[Any, Any]] = []  # with the layers that added them
        self._generators = generators  # the indices of the layers' seed generators
        self._drawn: dict[int, torch.Tensor] = {}
        self._draws = 0

    def get_current_value(self, variable: Any) -> torch.Tensor:
        value = self.values.get(id(variable))
        if value is None:
            raise UnsupportedInGraph("it reads a variable that is not one of its own")
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if id(variable) not in self.values or not (
            variable.aggregation == "none" or is_sync_on_read(variable)
        ):
            raise UnsupportedInGraph("it assigns a variable that replicas aggregate")
        self.values[id(variable)] = self.written[id(variable)] = value.detach()

    def dropped(
        self,
        inputs: torch.Tensor,
        rate: float,
        noise_shape: Sequence[int | None] | None,
        seed: Any,
        is_seeded: bool,
    ) -> torch.Tensor:
        """Apply dropout, with the arguments of `keras.random.dropout`."""
        number = -1 if seed is None else self._generators.get(id(seed))
        if number is None:
            raise UnsupportedInGraph("it draws from a seed of none of its layers")
        shape = None
        if noise_shape is not None:
            shape = [-1 if size is None else size for size in noise_shape]
        # A data dependency orders the draws of a generator.
        previous = self._drawn.get(number)
        self._draws += 1
        scales = _scales(inputs.detach(), rate, shape, number, previous, self._draws)
        self._drawn[number] = scales
        if not (is_seeded or (random.settings.exact and inputs.is_cuda)):
            return inputs * scales  # as the replica does eagerly
        return torch.where(scales != 0, inputs / (1.0 - rate), 0)


@multi_replica_only
def current_graph() -> GraphScope | None:
    """Return the scope of the graph that this thread traces, or None."""
    scope = current_stateless_scope()
    return scope if isinstance(scope, GraphScope) else None


class _UnknownNumber:
    """A number that depends on the replica and the step."""

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedInGraph("it reads the row weight of a replica")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__ = __radd__ = _refuse
    __bool__ = __float__ = __array__ = _refuse
    __hash__ = None  # pyright: ignore


_unknown_number = _UnknownNumber()


class _Step:
    """The step of a replica, as far as a graph can read it."""

    is_applying = True  # assigned values are aggregated after the graph
    is_drawing = has_all_rows = False
    logs_are_metrics = True

    @property
    def row_weight(self) -> Any:
        graph = current_graph()
        weight = None if graph is None else graph.row_weight
        return _unknown_number if weight is None else weight

    @property
    def rows(self) -> Any:
        raise UnsupportedInGraph("it draws random numbers for a replica's rows")


class _Unsupported:
    """The substitute for an object of one replica, while a graph is traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch inspects its type
            raise AttributeError(name)
        raise UnsupportedInGraph(f"it reads `{name}` of a replica")


class _AnyReplica(_Unsupported):
    step = _Step()


class _AnyContext(_Unsupported):
    """The `ReplicaContext` of `_AnyReplica`."""

    _replica = _AnyReplica()
    _replicas = 2  # or more

    def __init__(self, strategy: Any):
        self.strategy = strategy


class _NoAttributes(_Unsupported):
    """The substitute for `ReplicaAttributes`."""

    def set(self, layer: Any, name: str, value: Any) -> None:
        raise UnsupportedInGraph(f"it sets {type(layer).__name__}.{name}")


# The replica and its attributes that this thread executes a graph for, and the
# generators of the graph's layers.
_execution = threading.local()
_no_attributes: Any = _NoAttributes()


@contextlib.contextmanager
def _enter_graph_context(any_context: Any, generators: Sequence[Any]) -> Iterator[None]:
    """Let a replica's thread trace or execute a graph, whose layers have generators."""
    replica = thread_state.replica, current_turn.attributes
    _execution.replica, _execution.generators = replica, generators
    thread_state.replica, current_turn.attributes = any_context, _no_attributes
    # Keras would wrap each call to improve its error messages.
    is_filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if is_filtering:
            keras.config.enable_traceback_filtering()
        thread_state.replica, current_turn.attributes = replica
        del _execution.replica, _execution.generators


@torch.library.custom_op("keras_strategy::scales", mutates_args=())
def _scales(
    inputs: torch.Tensor,
    rate: float,
    noise_shape: Sequence[int] | None,
    generator: int,
    previous: torch.Tensor | None,
    draw: int,
) -> torch.Tensor:
    """Apply dropout to ones, drawn by the replica that executes the graph."""
    # The index of the process's seed generator is -1. What the same generator drew
    # before fixes the order; a draw's unique number keeps torch from merging two.
    shape = None
    if noise_shape is not None:
        shape = [None if size == -1 else size for size in noise_shape]
    seed = None if generator == -1 else _execution.generators[generator]
    in_graph = thread_state.replica, current_turn.attributes
    thread_state.replica, current_turn.attributes = _execution.replica
    try:
        return keras_random.dropout(torch.ones_like(inputs), rate, shape, seed)
    finally:
        thread_state.replica, current_turn.attributes = in_graph


@_scales.register_fake
def _fake_scales(inputs, rate, noise_shape, generator, previous, draw) -> torch.Tensor:
    return torch.empty_like(inputs)


logger = logging.getLogger("keras_strategy")
INDUCTOR = "inductor"
# For one forward pass on one device; torch's default.
MAX_GRAPHS = 8
_NO_WEIGHTS = "The model does not have any trainable weights."  # as Keras reports it
_unpack: Callable[[Any], Any] = keras.utils.unpack_x_y_sample_weight
# What was logged for each model, by `fit` or `evaluate`.
_logged: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class CompiledModel:
    """Context manager in which a model and its submodels compile their calls."""

    # With `training`, for `fit` or `evaluate`, the loss and the metrics, too.

    def __init__(self, model: keras.Model, strategy: Any, training: bool | None):
        self._model = model
        self.strategy = strategy
        devices = strategy.extended.worker_devices
        # On CPUs "eager" runs torch's kernels: results are rounded as without a graph,
        # and no C++ compiler is needed.
        on_cpu = all(":cpu:" in f":{device}".lower() for device in devices)
        self.backend = os.environ.get("KERAS_STRATEGY_TORCH_COMPILE_BACKEND") or (
            "eager" if on_cpu else INDUCTOR
        )
        self.max_graphs = MAX_GRAPHS * len(devices)
        self.has_news = False  # True if a pass has become a graph or was refused
        models = [model, *(x for x in all_layers(model) if isinstance(x, keras.Model))]
        self._passes = [
            ForwardPass(submodel, self)
            for submodel in {id(submodel): submodel for submodel in models}.values()
        ]
        self.step = None if training is None else LossAndMetrics(model, self, training)

    def __enter__(self) -> None:
        for forward in self._passes:
            vars(forward.layer)["call"] = forward.called

    def __exit__(self, *error: Any) -> None:
        for forward in self._passes:
            forward.restore()
        if self.has_news:
            self.has_news = False
            self._log()

    def _log(self) -> None:
        """Log which forward passes are compiled, if that is new."""
        graphs = [f"'{f.layer.name}'" for f in self._passes if f.has_graph]
        eager = [f"'{f.layer.name}' ({why})" for f in self._passes for why in f.refused]
        parts, what = [], "the forward pass"
        if self.step is not None:
            if self.step.has_graph:
                graphs = graphs or [f"'{self._model.name}'"]
                what = "the forward pass with loss and metrics"
            known = {why for forward in self._passes for why in forward.refused}
            eager += [
                f"the loss and metrics of '{self._model.name}' ({why})"
                for why in self.step.refused
                if why not in known
            ]
        if graphs:
            parts.append(
                f"{what} of {' and of '.join(graphs)} is one graph of "
                f"torch.compile, backend '{self.backend}'"
            )
        if eager:
            parts.append(
                f"without a graph, and with the same results: {'; '.join(eager)}"
            )
        line = "; ".join(parts)
        logged = _logged.setdefault(self._model, set())
        if line not in logged:
            logged.add(line)
            logger.log(
                logging.WARNING if eager else logging.INFO,
                "jit_compile=True of the model '%s': %s.",
                self._model.name,
                line,
            )


class _Graph:
    """A function of a model, compiled if possible."""

    _traced: Callable[..., Any]  # computes the outputs of the graph
    _call_eagerly: Callable[..., Any]
    _apply_results: Callable[..., Any]  # of a graph, to the replica

    def __init__(self, layer: keras.Model, compiled: CompiledModel):
        self.layer = layer
        self.has_graph = False  # True if a graph was executed
        self.refused: list[str] = []  # reasons for eager calls
        self._compiled = compiled
        self._context = _AnyContext(compiled.strategy)
        self._variables: list[Any] = []
        self._generators: list[Any] = []
        self._eager_kinds: set[Any] = set()
        self._graph: Callable[..., Any] | None = None

    def _select_variables(self) -> list[Any]:
        # Reads of sums are recorded, and metrics depend on the replica's rows.
        return [
            variable
            for variable in self.layer.variables
            if variable.aggregation != "sum" and not is_sync_on_read(variable)
        ]

    def _execute(
        self, replica: Any, args: tuple, kwargs: dict, row_weight: Any = None
    ) -> Any:
        if self._graph is None and all(x.built for x in all_layers(self.layer)):
            self._graph = self._compile()
        if self._graph is None or (
            self._eager_kinds and _kind(args, kwargs) in self._eager_kinds
        ):
            return self._call_eagerly(*args, **kwargs)
        leaves = tree.flatten((args, kwargs))
        if any(keras_masking.get_keras_mask(x) is not None for x in leaves):
            return self._refuse("its inputs have masks", args, kwargs)
        values = list(map(replica.scope.get_current_value, self._variables))
        try:
            with _enter_graph_context(self._context, self._generators):
                results = self._graph(values, row_weight, args, kwargs)
        except Exception as error:
            # If it is the model's own error, the eager call raises it again.
            return self._refuse(_why(error), args, kwargs)
        if not self.has_graph:
            self.has_graph = self._compiled.has_news = True
        return self._apply_results(values, *results)

    def _compile(self) -> Callable[..., Any]:
        """Return the function with the variables' values as its first argument."""
        variables = self._variables = self._select_variables()
        self._generators = seed_generators(all_layers(self.layer))
        numbers = {id(generator): i for i, generator in enumerate(self._generators)}
        call, backend = self._traced, self._compiled.backend

        def compute(values, row_weight, args, kwargs):
            by_id = {}
            for variable, value in zip(variables, values):  # noqa: B905, is compiled
                by_id[id(variable)] = value
            scope = GraphScope(by_id, numbers, row_weight)
            with scope:
                outputs = call(*args, **kwargs)
            masks = [keras_masking.get_keras_mask(x) for x in tree.flatten(outputs)]
            return outputs, masks, scope.written, scope.losses

        return torch.compile(  # pyright: ignore[reportCallIssue]
            compute,
            fullgraph=True,
            backend=_run_kernels if backend == "eager" else backend,
            # Compile processes hang in a forked process.
            options={
                "guard_filter_fn": _select_guards,
                **({"compile_threads": 1} if backend == INDUCTOR else {}),
            },
            recompile_limit=self._compiled.max_graphs,
            isolate_recompiles=True,
        )

    def _refuse(self, why: str, args: tuple, kwargs: dict) -> Any:
        outputs = self._call_eagerly(*args, **kwargs)
        self._eager_kinds.add(_kind(args, kwargs))
        if why not in self.refused:
            self.refused.append(why)
            self._compiled.has_news = True
        return outputs


class ForwardPass(_Graph):
    """The `call` of a model."""

    def __init__(self, layer: keras.Model, compiled: CompiledModel):
        super().__init__(layer, compiled)
        self._instance_call = vars(layer).get("call")
        self._traced = self._call_eagerly = layer.call

        @functools.wraps(layer.call)
        def called(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._traced(*args, **kwargs)
            replica = distributed_replica()
            # No graphs for the shapes of dry runs and of replicas without rows.
            if replica is None or not replica.step.row_weight:
                return self._traced(*args, **kwargs)
            return self._execute(replica, args, kwargs)

        self.called = called  # the replacement of the model's `call`

    def restore(self) -> None:
        if self._instance_call is None:
            vars(self.layer).pop("call", None)
        else:
            vars(self.layer)["call"] = self._instance_call

    def _apply_results(self, values, outputs, masks, written, losses) -> Any:
        if written:
            for variable in self._variables:
                if id(variable) in written:
                    variable.assign(written[id(variable)])
        for layer, loss in losses:
            layer.add_loss(loss)
        if any(mask is not None for mask in masks):
            for output, mask in zip(tree.flatten(outputs), masks, strict=True):
                keras_masking.set_keras_mask(output, mask)
        return outputs


class LossAndMetrics(_Graph):
    """Keras's `train_step` or `test_step`, up to the loss and the metrics."""

    def __init__(self, layer: keras.Model, compiled: CompiledModel, training: bool):
        super().__init__(layer, compiled)
        self._training = training
        self._eager_step = layer.train_step if training else layer.test_step
        self._places: list[int] = []  # of the weights among the variables

    def _select_variables(self) -> list[Any]:
        model = self.layer
        candidates = {id(v): v for v in (*model.variables, *model.metrics_variables)}
        variables = {
            key: variable
            for key, variable in candidates.items()
            if variable.aggregation != "sum" or is_sync_on_read(variable)
        }
        places = {key: place for place, key in enumerate(variables)}
        self._places = [places[id(v)] for v in model.weights if id(v) in places]
        return list(variables.values())

    def _traced(self, x: Any, y: Any, sample_weight: Any) -> torch.Tensor:
        y_pred, loss = compute_loss(self.layer, x, y, sample_weight, self._training)
        graph = current_graph()
        if graph is None or graph.losses:
            raise UnsupportedInGraph("it adds a loss in a layer")
        with torch.no_grad():
            update_metrics(self.layer, x, y, y_pred, loss, sample_weight)
        return loss

    def __call__(self, data: Any) -> Any:
        """Run the step on a replica's rows."""
        replica, batch = distributed_replica(), _unpack(data)
        if replica is None or not replica.step.row_weight:
            return self._call_eagerly(*batch)
        # A tensor, so that another split of the rows is not compiled again.
        weight = torch.tensor(replica.step.row_weight, dtype=torch.float64)
        return self._execute(replica, batch, {}, weight)

    def _call_eagerly(self, x: Any, y: Any, sample_weight: Any) -> Any:
        return self._eager_step((x, y, sample_weight))

    def _apply_results(self, values, outputs, masks, written, losses) -> Any:
        replica: Any = distributed_replica()
        for variable in self._variables if written else ():
            value = written.get(id(variable))
            if value is None:
                continue
            if is_sync_on_read(variable):  # a metric's: without Keras's conversions
                replica.write(variable, aggregate_assignment(replica, variable, value))
            else:
                variable.assign(value)
        if self._training:
            self._minimize(outputs, values)
        return self.layer.get_metrics_result()

    def _minimize(self, loss: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        optimizer, variables = self.layer.optimizer, self._variables
        weights, tensors = [], []
        for place in self._places:
            if variables[place].trainable:
                values[place].grad = None
                weights.append(variables[place])
                tensors.append(values[place])
        if not weights:
            warnings.warn(_NO_WEIGHTS, stacklevel=2)
            return
        optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            optimizer.apply([tensor.grad for tensor in tensors], weights)


def _run_kernels(graph: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Any:
    """Execute torch's kernels, without Keras's conversions that change nothing."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is getattr and not node.users:
            graph.graph.erase_node(node)
        elif node.op == "call_method" and node.target == "to" and len(node.args) == 2:
            source, result = (n.meta.get("example_value") for n in (node.args[0], node))
            if (
                not node.kwargs
                and isinstance(node.args[1], str | torch.dtype | torch.device)
                and isinstance(source, torch.Tensor)
                and (source.dtype, source.device) == (result.dtype, result.device)
            ):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


# What torch.compile finds in modules of Keras and torch: functions, classes, constants.
_LIBRARIES = re.compile(
    r"(dict\(|type\()*G\['__(builtins_dict|import_(torch|keras)(_dot_|'\])|"
    r"import_keras_strategy_dot_(backends|keras_patches)_dot_)"
)


def _select_guards(guards: Sequence[Any]) -> list[bool]:
    """Return False for guards on what a running program does not change."""
    # They would take longer than the kernels of a small model. Keras's and torch's
    # settings are checked, and all that can be reached from a model.
    return [
        _LIBRARIES.match(guard.name) is None
        or "GLOBAL_S" in guard.name
        or "config" in guard.name
        for guard in guards
    ]


def _kind(args: tuple, kwargs: dict) -> Any:
    """Return what graphs are specialized for: shapes, dtypes and Python values."""

    def kind_of(leaf):
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)

    leaves = map(kind_of, tree.flatten((args, kwargs)))
    return torch.is_grad_enabled(), tuple(kwargs), tuple(leaves)


def _why(error: Exception) -> str:
    """Format an error of torch.compile in a line, with the `call` it is from."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "inputs of further shapes: the limit of torch.compile is reached"
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    calls = [frame for frame in frames if frame[2] == "call"] or frames
    where = ""
    if calls:
        path, line, _ = calls[-1]
        where = f", from {path.split('site-packages/')[-1]}:{line}"
    error = getattr(error, "inner_exception", error)  # the backend's error
    text = str(error)
    raised = re.search(r"raised exception (.+)", text)
    reason = raised[1] if raised else text.strip().split("\n")[0]
    refused = re.search(r"UnsupportedInGraph\W+(it \w.*?)\W*$", reason)
    if refused:
        return f"{refused[1]}{where}"
    return f"{type(error).__name__}: {reason}{where}"
