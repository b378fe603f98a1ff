"""The replicas of one strategy: threads that run the same function."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from keras_strategy import context
from keras_strategy.backends import get_backend
from keras_strategy.backends.torch import keras_hooks
from keras_strategy.backends.torch.components import add, find_or_make
from keras_strategy.backends.torch.devices import torch_device
from keras_strategy.backends.torch.rendezvous import Rendezvous, ReplicaStopped
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.run import Run
from keras_strategy.backends.torch.staging import MergedScope
from keras_strategy.backends.torch.workers import Workers
from keras_strategy.updating import update_components
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    ReduceOp,
    regroup,
    select_replica,
)

_HALF_WRITTEN = (
    "keras_strategy: the training step had begun to update the variables. They are "
    "the same on all replicas, but may be half-updated: load them again from a "
    "checkpoint before you go on."
)


class TorchGroup:
    """See `backends.protocol.ReplicaGroup`.

    Args:
        strategy: The strategy.
        devices: Canonical names of its devices, one replica each.
    """

    def __init__(self, strategy: Any, devices: tuple[str, ...]):
        self.strategy = strategy
        self.devices = devices
        self.torch_devices = tuple(torch_device(name) for name in devices)
        self.num_replicas = len(devices)
        self._rendezvous = Rendezvous(len(devices))
        self._workers: Workers | None = None
        self._lock = threading.Lock()

    def scope(self):
        return keras.device(self.torch_devices[0])

    def adopt(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            find_or_make(variable, self.torch_devices)

    def components(self, variable: Any) -> tuple[torch.Tensor, ...]:
        scope = keras_hooks.keras_scope()
        if isinstance(scope, MergedScope):
            return tuple(tensor.detach() for tensor in scope.components(variable))
        components = find_or_make(variable, self.torch_devices)
        components.refresh(variable)
        return tuple(tensor.detach() for tensor in components.tensors)

    def assign_components(self, variable: Any, values: Sequence[torch.Tensor]) -> None:
        scope = keras_hooks.keras_scope()
        if isinstance(scope, MergedScope):
            scope.assign_components(variable, values)
        else:
            find_or_make(variable, self.torch_devices).assign_each(values)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        return update_components(self, variable, fn, args, kwargs)

    def mirror(self, value: Any) -> Mirrored:
        return Mirrored([get_backend().copy_to(value, name) for name in self.devices])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: Any,  # there is nothing to compile
    ) -> Any:
        # One run at a time: a second one of another Python thread waits.
        with self._lock:
            return self._run(fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if self._workers is None:
            self._workers = Workers([f"keras_strategy {name}" for name in self.devices])
        run = Run()
        replicas = [
            TorchReplica(self, index, self._rendezvous, run)
            for index in range(self.num_replicas)
        ]
        state = keras_hooks.ThreadState.capture()
        calls = [
            functools.partial(
                self._run_replica,
                replica,
                functools.partial(fn, *replica_args, **replica_kwargs),
                state,
                torch.is_grad_enabled(),
            )
            for replica in replicas
            for replica_args, replica_kwargs in [
                select_replica((args, kwargs), replica.id)
            ]
        ]
        results = self._workers.call(calls, self._rendezvous.abort)
        errors = [error for _, error in results if error is not None]
        if errors:
            self._rendezvous.reset()
            raise self._failure(errors, replicas)
        replicas[0].scope.note_versions()
        state.keep_global_seed_generator()
        return results[0][0]

    def _run_replica(
        self,
        replica: TorchReplica,
        fn: Callable[[], Any],
        state: "keras_hooks.ThreadState",
        gradients: bool,
    ) -> Any:
        device = self.torch_devices[replica.id]
        try:
            if device != "cpu":
                torch.cuda.set_device(device)
            with (
                state.applied(),
                keras.device(device),
                torch.set_grad_enabled(gradients),
                context.replica_in_charge(replica.context),
                replica.scope,
            ):
                output = fn()
                # Nothing is written before every replica has come this far.
                outputs = replica.exchange(
                    "the end of the function",
                    output,
                    lambda outputs: regroup(outputs, torch.is_tensor),
                )
            replica.scope.commit()
            return outputs
        except BaseException:
            self._rendezvous.abort()
            raise

    def _failure(
        self, errors: Sequence[BaseException], replicas: Sequence[TorchReplica]
    ) -> BaseException:
        """The error that stopped the others, after the mirror is mended."""
        causes = [error for error in errors if not isinstance(error, ReplicaStopped)]
        error = causes[0] if causes else errors[0]
        changed: dict[int, Any] = {}
        for replica in replicas:
            changed.update(replica.scope.changed_in_place)
        for variable in changed.values():
            components = find_or_make(variable, self.torch_devices)
            with torch.no_grad():
                for tensor in components.tensors[1:]:
                    tensor.copy_(components.first)
            components.version = components.first._version
        if changed:
            error.add_note(_HALF_WRITTEN)
        return error

    def reduce(
        self, reduce_op: ReduceOp, value: DistributedValues, axis: Any
    ) -> torch.Tensor:
        device = self.torch_devices[0]
        values = [_tensor(v).to(device) for v in value.values]
        if axis is not None:
            return _reduce_axes(reduce_op, values, axis)
        shapes = [tuple(v.shape) for v in values]
        if len(set(shapes)) > 1:
            raise ValueError(
                "`reduce` with axis=None needs values of the same shape on every "
                f"replica. Received the shapes {shapes}, in the order of the "
                "replicas. Give the axis along which they differ, or use `gather`."
            )
        total = add(values)
        return total / len(values) if reduce_op is ReduceOp.MEAN else total

    def gather(self, values: Sequence[Any], axis: int) -> torch.Tensor:
        device = self.torch_devices[0]
        return torch.cat([v.to(device) for v in values], dim=axis)


def _tensor(value: Any) -> torch.Tensor:
    try:
        return keras.ops.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Only tensors and numbers can be combined over the replicas. "
            f"Received: {value!r} of type {type(value).__name__}"
        ) from error


def _reduce_axes(
    reduce_op: ReduceOp, values: Sequence[torch.Tensor], axis: Any
) -> torch.Tensor:
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    for v in values:
        if any(not -v.ndim <= a < v.ndim for a in axes):
            raise ValueError(
                "Argument `axis` must name dimensions that the values have. "
                f"Received: axis={axis!r} for a value of shape {tuple(v.shape)}"
            )
    total = add([v.sum(dim=tuple(axes)) for v in values])
    if reduce_op is ReduceOp.SUM:
        return total
    # Replicas may have different numbers of rows: count what was added.
    counts = [int(torch.tensor([v.shape[a] for a in axes]).prod()) for v in values]
    return total / sum(counts)
