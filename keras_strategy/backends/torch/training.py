"""The functions of `fit`, `evaluate` and `predict` for a batch: a loop over `run`.

Merging the logs of a batch costs a collective. It is left out if no callback, on any
worker, reads them, which `BatchLogs` records.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_strategy.audit.policy import RowPolicy, take_own_rows, with_all_rows
from keras_strategy.audit.snapshot import is_keras
from keras_strategy.backends.threads.pool import KerasStep
from keras_strategy.backends.torch.compilation import CompiledModel
from keras_strategy.backends.torch.state import COMPONENTS, ShardedGradient
from keras_strategy.core.protocols import AuditAdapter
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.layers import all_layers
from keras_strategy.keras_patches.losses_metrics import is_known_step
from keras_strategy.keras_patches.patch import keras_changed_error
from keras_strategy.keras_patches.trainer import (
    BATCH_LOGS,
    build_compiled_metrics,
    build_for_step,
)
from keras_strategy.training import train_step as rules
from keras_strategy.training.batch_function import BatchFunction, arrays_of


class TorchBatchFunction(BatchFunction):
    """A train, test or predict function, called by Keras for a list of batches."""

    # The list has more than one with `steps_per_execution`, which Keras supports on
    # torch since 3.16. Keras passes the logs to the callbacks, and ends the epoch with
    # the metrics' results if all logs are named after metrics.

    def __init__(self, model: keras.Model, kind: str, strategy: Any):
        self._keras_step = step = getattr(model, f"{kind}_step")
        self._compiled: Any = contextlib.nullcontext()
        if model.jit_compile and not model.run_eagerly:
            if strategy.shard == "parameters":
                raise ValueError(
                    "jit_compile=True is not available with shard='parameters' on "
                    "torch: a compiled graph cannot gather weights. Omit it in "
                    f"`compile` of the model '{model.name}', or use shard='optimizer'."
                )
            is_known = rules.returns_only_metrics(model, kind) and is_known_step(step)
            training = kind == "train" if is_known else None
            self._compiled = CompiledModel(model, strategy, training)
            step = self._compiled.step or step
        layers = functools.partial(all_layers, model)
        policy = RowPolicy(model, kind, strategy)
        super().__init__(model, kind, strategy, step, layers, policy)
        # Nothing of the user's follows `optimizer.apply`, except for metrics.
        is_regular = self._returns_metrics and _exchanges_alike(model, strategy)
        if is_regular:
            self._step = KerasStep(self._call_step)
        self._may_lack_metrics = kind != "predict"
        self._metric_names: set[str] | None = None

    def __call__(self, batches: Sequence[Any]) -> Any:
        if self._may_lack_metrics:
            self._may_lack_metrics = False
            build_compiled_metrics(self._model, arrays_of(batches[0]))
        return self.run_batches(batches)

    def run_batch(self, batch: Any) -> Any:
        is_training = self._kind == "train"
        with (
            self._compiled,
            contextlib.nullcontext() if is_training else torch.no_grad(),
        ):
            if self._kind == "predict":
                build_for_step(self._model, "predict", batch)
            return super().run_batch(batch)

    def _run_whole(self, batch: Any) -> Any:
        batch, step = with_all_rows(batch, self._strategy), self._keras_step
        with torch.set_grad_enabled(self._kind == "train"):
            outputs = rules.run_whole(self._strategy, step, (arrays_of(batch),), {})
        if self._kind != "predict":
            return outputs
        return take_own_rows(outputs, batch, self._strategy)

    def _slice(self, replica: int, begin: int, end: int, array: Any) -> Any:
        # Slices of one tensor share autograd's version counter, so a replica's in-place
        # change would fail the others' backward pass. `data` has its own.
        if isinstance(array, torch.Tensor):
            array = array.data
        return None if array is None else array[begin:end]

    def _call_step(self, local: Any) -> Any:
        data = self._group.arrays_to_tensors(local.data)
        return self._weighted_step(data, local.weight, local.rows)

    def _merge_logs(self, logs: Any, weights: list[float]) -> Any:
        model = self._model
        shared = getattr(model, BATCH_LOGS, {}).get(self._kind)
        # A function of the user's around this one may read them, too.
        is_wrapped = getattr(model, f"{self._kind}_function") is not self
        if shared is not None and shared.are_read is False and not is_wrapped:
            if self._metric_names is None:
                with keras.StatelessScope():  # without a collective
                    self._metric_names = set(model.get_metrics_result())
            # The loop ends with the metrics if their names are those of the logs.
            has_names = isinstance(logs, dict) and set(logs) == self._metric_names
            if self._returns_metrics or has_names:
                return dict.fromkeys(self._metric_names)
        with torch.no_grad():
            return super()._merge_logs(logs, weights)


def make_step_function(
    strategy: Any, model: keras.Model, kind: str, make: Callable[[], Any]
) -> Any:
    """Return a function that runs a batch by `strategy.run`; `make` returns Keras's."""
    function = make()
    for name, value in vars(model).items():
        if issubclass(type(value), DistributedDataParallel):
            raise keras_changed_error(
                "Model.make_train_function",
                f"wraps a model in DistributedDataParallel (Model.{name}), although "
                "the strategy distributes it",
            )
    if strategy.num_replicas_in_sync == 1:
        return function
    return TorchBatchFunction(model, kind, strategy)


def _exchanges_alike(model: keras.Model, strategy: Any) -> bool:
    """Return True if the replicas exchange as often in each step of the optimizer."""
    # Shards are joined only after an update, which LossScaleOptimizer may leave out.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return strategy.shard is None and is_keras(type(optimizer))


class StepAccess(AuditAdapter):
    """Access to the backend's state and a model's steps, for `keras_strategy.audit`."""

    def host_copy(self, x: Any) -> np.ndarray | None:
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        x = x.detach()
        if x.dtype is torch.bfloat16:
            x = x.float()
        return (x.to_dense() if x.is_sparse else x).cpu().numpy().copy()

    def tensor_restorer(self, x: Any) -> Callable[[], None] | None:
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        copy, gradient = x.detach().clone(), _copy_of_gradient(x)

        def restore():
            # Not by its version: batch normalizations write to it without a new one.
            if not torch.equal(x.detach(), copy):
                x.data.copy_(copy)
            if x.is_leaf:
                x.grad = gradient

        return restore

    def module_tensors(self, x: Any) -> Sequence[torch.Tensor]:
        is_module = isinstance(x, torch.nn.Module)
        return [*x.parameters(), *x.buffers()] if is_module else ()

    def stored_tensors(self, variable: Any) -> Sequence[torch.Tensor]:
        components = vars(variable).get(COMPONENTS)
        if components is None:
            return [stored_value(variable)]
        return components.all_tensors()

    def gradient_restorers(self, variable: Any) -> list[Callable[[], None]]:
        return [
            functools.partial(setattr, tensor, "grad", _copy_of_gradient(tensor))
            for tensor in self.stored_tensors(variable)
        ]

    def preserve_generators(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(range(torch.cuda.device_count()))

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        function = TorchBatchFunction(model, kind, strategy)
        function._compiled = contextlib.nullcontext()
        step, group = getattr(model, f"{kind}_step"), strategy.extended.group

        def step_on_device(batch):
            with torch.set_grad_enabled(kind == "train"):
                return step(group.arrays_to_tensors(copy.deepcopy(batch)))

        def step_on_replicas(batch):
            # Steps may write to their rows, as Keras does to weights with a mask.
            return function.run_batch(copy.deepcopy(batch))

        return step_on_replicas, step_on_device


def _copy_of_gradient(x: torch.Tensor) -> torch.Tensor | None:
    if not x.is_leaf or x.grad is None:
        return None
    # Nothing writes to a sharded one.
    is_sharded = isinstance(x.grad, ShardedGradient)
    return x.grad if is_sharded else x.grad.detach().clone()
