"""The functions of `fit`, `evaluate` and `predict` for a batch: a loop over `run`.

Merging the logs of a batch costs a collective. It is left out if no callback, on any
worker, reads them, which `BatchLogs` records.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras import tree
from torch.nn.parallel import DistributedDataParallel

from keras_strategy.audit.policy import RowPolicy, take_own_rows, with_all_rows
from keras_strategy.audit.snapshot import is_keras
from keras_strategy.backends.threads.pool import KerasStep
from keras_strategy.backends.torch.compilation import CompiledModel
from keras_strategy.backends.torch.state import COMPONENTS, ShardedGradient
from keras_strategy.core.protocols import AuditAdapter
from keras_strategy.core.step_state import LocalRows, RowRange
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
from keras_strategy.training.row_weights import local_bounds
from keras_strategy.training.train_step import count_array_rows
from keras_strategy.values import (
    PerReplica,
    is_numeric_array,
    map_leaves,
)


class BatchFunction:
    """A train, test or predict function, called by Keras for a list of batches."""

    # The list has more than one with `steps_per_execution`, which Keras supports on
    # torch since 3.16. Keras passes the logs to the callbacks, and ends the epoch with
    # the metrics' results if all logs are named after metrics.

    def __init__(self, model: keras.Model, kind: str, strategy: Any):
        self.policy = RowPolicy(model, kind, strategy)
        self._model, self._kind, self._strategy = model, kind, strategy
        self._group = strategy.extended.group
        self._returns_metrics = rules.returns_only_metrics(model, kind)
        self._keras_step = step = getattr(model, f"{kind}_step")
        self._compiled: Any = contextlib.nullcontext()
        if model.jit_compile and not model.run_eagerly:
            if strategy.shard == "parameters":
                raise ValueError(
                    "jit_compile=True is not available with shard='parameters' on "
                    "torch: a compiled graph cannot gather weights. Omit it in "
                    f"`compile` of the model '{model.name}', or use shard='optimizer'."
                )
            is_known = self._returns_metrics and is_known_step(step)
            training = kind == "train" if is_known else None
            self._compiled = CompiledModel(model, strategy, training)
            step = self._compiled.step or step
        self._weighted_step = rules.make_weighted_step(
            step,
            self._returns_metrics,
            lambda: all_layers(model),
            _check,
            (lambda tensor: tensor.shape[0]) if kind == "predict" else None,
        )
        # Nothing of the user's follows `optimizer.apply`, except for metrics.
        is_regular = self._returns_metrics and _exchanges_alike(model, strategy)
        self._step = KerasStep(self._call) if is_regular else self._call
        self._may_lack_metrics = kind != "predict"
        self._metric_names: set[str] | None = None

    def __call__(self, batches: Sequence[Any]) -> Any:
        if self._may_lack_metrics:
            self._may_lack_metrics = False
            build_compiled_metrics(self._model, _arrays_of(batches[0]))
        if not self.policy.is_done and self.policy.is_due():
            self.policy.audit(batches[0])
        if self.policy.runs_whole:
            outputs = [self._run_whole(batch) for batch in batches]
        else:
            with self._compiled:
                outputs = [self.run_batch(batch) for batch in batches]
        if self._kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        return outputs[-1]

    def run_batch(self, batch: Any) -> Any:
        """Run the step on a global batch; return merged logs, or predictions."""
        local_batches = _split(batch, self._strategy)
        weights = [local.weight for local in local_batches]
        args = (PerReplica(local_batches),)
        if self._kind == "train":
            return self._merge_logs(self._strategy.run(self._step, args=args), weights)
        with torch.no_grad():
            if self._kind == "predict":
                build_for_step(self._model, "predict", batch)
            outputs = self._strategy.run(self._step, args=args)
            if self._kind == "test":
                return self._merge_logs(outputs, weights)
        is_global = not (isinstance(batch, LocalRows) and batch.worker_rows)
        return self._join_predictions(outputs, weights, is_global)

    def _run_whole(self, batch: Any) -> Any:
        """Run the step on all rows of a global batch at once."""
        batch, step = with_all_rows(batch, self._strategy), self._keras_step
        with torch.set_grad_enabled(self._kind == "train"):
            outputs = rules.run_whole(self._strategy, step, (_arrays_of(batch),), {})
        if self._kind != "predict":
            return outputs
        return take_own_rows(outputs, batch, self._strategy)

    def _call(self, local: "_LocalBatch") -> Any:
        data = local.data
        if local.has_arrays:
            data = self._group.arrays_to_tensors(data)
        return self._weighted_step(data, local.weight, local.rows)

    def _merge_logs(self, logs: Any, weights: list[float]) -> Any:
        model = self._model
        shared = getattr(model, BATCH_LOGS, {}).get(self._kind)
        # A function of the user's around this one may read them, too.
        is_wrapped = getattr(model, f"{self._kind}_function") is not self
        with torch.no_grad():
            if shared is not None and shared.are_read is False and not is_wrapped:
                if self._metric_names is None:
                    with keras.StatelessScope():  # without a collective
                        self._metric_names = set(model.get_metrics_result())
                # The loop ends with the metrics if their names are those of the logs.
                has_names = isinstance(logs, dict) and set(logs) == self._metric_names
                if self._returns_metrics or has_names:
                    return dict.fromkeys(self._metric_names)
            if self._returns_metrics:
                return model.get_metrics_result()
            return rules.average_logs(logs, weights, self._group.layout.sum_logs)

    def _join_predictions(
        self, outputs: Any, weights: list[float], is_global: bool
    ) -> Any:
        """Join the predictions of all workers' rows, or of this worker's."""

        def gather(value):
            if not isinstance(value, PerReplica):
                return value
            pairs = zip(value.values, weights, strict=True)
            values = [component for component, weight in pairs if weight > 0]
            # A worker without rows takes part in the gather, too.
            values = values or [value.values[0][:0]]
            if is_global:
                return self._group.gather(values, axis=0)
            device = self._group.torch_devices[0]
            return torch.cat([value.to(device) for value in values])

        return tree.map_structure(gather, outputs)


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
    return BatchFunction(model, kind, strategy)


def _exchanges_alike(model: keras.Model, strategy: Any) -> bool:
    """Return True if the replicas exchange as often in each step of the optimizer."""
    # Shards are joined only after an update, which LossScaleOptimizer may leave out.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return strategy.shard is None and is_keras(type(optimizer))


def _arrays_of(batch: Any) -> Any:
    return batch.batch if isinstance(batch, LocalRows) else batch


@dataclass(frozen=True)
class _LocalBatch:
    """The local batch of a replica; a leaf for Keras's trees."""

    data: Any
    weight: float
    rows: RowRange
    has_arrays: bool  # some of the data are NumPy arrays


def _split(batch: Any, strategy: Any) -> list[_LocalBatch]:
    """Split a global batch, or this worker's rows of it, over the local replicas."""
    # A replica without rows gets the first row and the weight 0, since some metrics do
    # not accept a batch of 0 rows.
    local = batch if isinstance(batch, LocalRows) else None
    batch = _arrays_of(batch)
    arrays: list[Any] = []
    map_leaves(arrays.append, batch)
    rows = count_array_rows(arrays)
    if rows == 0:
        raise ValueError("A batch must have 1 row or more. Received a batch of 0 rows.")
    total = rows if local is None else local.global_rows
    if local is None:
        bounds, first = local_bounds(strategy.extended.topology, total), 0
    else:
        bounds, first = local.bounds, local.bounds[0][0]
    has_arrays = any(map(is_numeric_array, arrays))

    def make_local_batch(begin, end):
        part = slice(begin - first, end - first) if end > begin else slice(1)

        def rows_of(array):
            if array is None:
                return None
            # Slices of one tensor share autograd's version counter, so a replica's
            # in-place change would fail the others' backward pass. `data` has its own.
            return (array.data if isinstance(array, torch.Tensor) else array)[part]

        return _LocalBatch(
            map_leaves(rows_of, batch),
            (end - begin) / total,
            RowRange(min(begin, total - 1), max(end - begin, 1), total),
            has_arrays,
        )

    return [make_local_batch(begin, end) for begin, end in bounds]


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
        function = BatchFunction(model, kind, strategy)
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
