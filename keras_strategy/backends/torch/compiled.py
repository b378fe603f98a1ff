"""`jit_compile` on torch: the forward pass of a model as one graph of torch.compile.

Loss, backward pass, the sum of the gradients and the optimizer stay around it as they
are: they are where replicas speak to each other. A forward pass that is no graph is
called as it is, with the same numbers, and a warning says why.
"""

import functools
import logging
import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.backends.torch.graph import GraphTracing, GraphScope, is_graph_readable
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.layers import all_layers, seed_generators
from keras_strategy.hooks.losses import keras_masking

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
                self._variables = [v for v in self.layer.variables if is_graph_readable(v)]
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
