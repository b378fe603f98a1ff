"""Costs of a training step on torch: measured for `plan`, and counted.

A plan uses fake tensors. In it, each device has a process.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import torch
import torch.distributed as dist
from keras import tree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_strategy.backends.threads.patches_sharding import (
    local_bytes as local_variable_bytes,
)
from keras_strategy.backends.threads.patches_sharding import (
    local_slot_bytes,
    new_sharding,
    slot_origin,
    unshardable_error,
)
from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.gradient_buckets import (
    FlatBufferPool,
    unflatten,
    write_weighted,
)
from keras_strategy.backends.torch.patches_optimizers import Adam
from keras_strategy.backends.torch.sharding import even_shards, group_into_units
from keras_strategy.backends.torch.state import Layout
from keras_strategy.keras_patches.variables_optimizers import stored_dtype
from keras_strategy.training.reduction import compute_and_comm_fractions
from keras_strategy.training.sharding import flat_shards_of, set_flat_shards


class _LiveBytes(TorchDispatchMode):
    """Count of the bytes of live fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # such as a seed, which has no value
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def forget(_: Any) -> None:
            self.live -= size
            del self._storages[key]

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, forget)
            self.live += size
            self.most = max(self.most, self.live)


_bytes = _LiveBytes()


def without_memory(fn: Callable[[], Any]) -> Any:
    _bytes.__init__()
    with FakeTensorMode(allow_non_fake_inputs=True), _bytes:
        return fn()


def local_bytes(
    weights: Sequence[Any],
    slots: Sequence[Any],
    optimizer: Any,
    replicas: int,
    shard: str | None,
) -> tuple[int, int]:
    if shard == "parameters":
        owners = {slot_origin(slot)[0] for slot in slots} - {None} or {optimizer}
        shardings = [new_sharding(owner, replicas) for owner in owners]
        if None in shardings:
            raise unshardable_error(optimizer)
        by_weight: Any = next((x for x in shardings if not x.elementwise), None)
        for unit in list(group_into_units(weights)):
            shards = even_shards([tuple(weight.shape) for weight in unit], replicas)
            if by_weight is not None:
                shards = [by_weight.whole_on_owner(w, tuple(w.shape)) for w in unit]
            for weight, of_weight in zip(unit, shards, strict=True):
                set_flat_shards(weight, of_weight)
    return (
        local_variable_bytes(weights, map(flat_shards_of, weights), replicas),
        local_slot_bytes(slots, replicas, shard),
    )


def measure_step(
    loss_of: Callable[..., tuple[Any, Any]],
    optimizer: Any,
    weights: Sequence[Any],
    states: Sequence[Any],
    inputs: Any,
    replicas: int,
    shard: str | None,
) -> int:
    if shard is not None:
        raise NotImplementedError("on torch it is measured for shard=None only.")

    def zeros(x: Any) -> Any:
        return keras.ops.zeros(x.shape, stored_dtype(x))

    parameters = [
        torch.nn.Parameter(x, x.is_floating_point()) for x in map(zeros, weights)
    ]
    states, inputs = list(map(zeros, states)), tree.map_structure(zeros, inputs)
    buffers = FlatBufferPool()

    def train() -> None:
        loss, _outputs = loss_of(parameters, states, inputs)  # kept for the logs
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        pairs = zip(parameters, weights, strict=True)
        trained = [(p.grad, weight) for p, weight in pairs if p.grad is not None]
        gradients: Any = [gradient for gradient, _ in trained]
        if replicas > 1:
            flat = buffers.take(sum(map(torch.numel, gradients)), gradients[0])
            write_weighted(flat, gradients, None)
            gradients = unflatten(flat, gradients)
        # The fused kernel of replicas has no temporaries.
        if replicas == 1 or not isinstance(optimizer, Adam):
            with torch.no_grad():
                optimizer.apply(gradients, [weight for _, weight in trained])

    gc.collect()  # garbage that is freed in the step would hide what it allocates
    before = _bytes.most = _bytes.live
    for _ in range(2):  # the second keeps the buffers of the first
        train()
    return _bytes.most - before


_COLLECTIVES = "all_reduce", "broadcast", "all_to_all_single"


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count collectives, their bytes, compilations and device copies."""
    # The collectives are calls of torch.distributed and sums over threads, and their
    # bytes those of this process, or of one thread. torch's CPUs are one device.
    collectives = data = copies = 0

    def count_collective(sent):
        nonlocal collectives, data
        collectives += 1
        data += sum(t.nbytes for t in sent if isinstance(t, torch.Tensor))

    def counting_collective(original):
        def counted(*args, **kwargs):
            # The first argument of an exchange is the output.
            is_in_place = original.__name__ != "all_to_all_single"
            values = [*args, *kwargs.values()]
            count_collective(values if is_in_place else values[1:])
            return original(*args, **kwargs)

        return counted

    def counting_sum(original):
        def counted(layout, name, tensors):  # one of each thread
            if len(tensors) > 1:
                count_collective(tensors[:1])
            return original(layout, name, tensors)

        return counted

    def counting_copy(original):
        def to(tensor, *args, **kwargs):
            nonlocal copies
            result = original(tensor, *args, **kwargs)
            copies += result.device != tensor.device
            return result

        return to

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            patches.enter_context(_wrapped(dist, name, counting_collective))
        gather = _wrapped(TorchWorkers, "start_gather", counting_collective)
        patches.enter_context(gather)
        patches.enter_context(_wrapped(Layout, "sum", counting_sum))
        patches.enter_context(_wrapped(torch.Tensor, "to", counting_copy))
        train(steps)
    return collectives, data, 0, copies


# The names of collectives in torch's profiler, and of sums over threads.
_SUMS = "keras_strategy::sum"
_COLLECTIVE_EVENTS = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "mpi:", _SUMS)


def shares(train: Callable[[int], None], steps: int) -> tuple[float, float] | None:
    """Return the fractions of time spent in computation and in collectives."""
    # On GPUs they are those of this process's kernels; on CPUs, those of torch's
    # operations in any thread, since replicas of one process take turns.
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiling: Any = torch.profiler
    everywhere = profiling._ExperimentalConfig(profile_all_threads=True)
    profiler = profiling.profile(activities=activities, experimental_config=everywhere)
    named = torch.profiler.record_function(_SUMS)
    with _wrapped(Layout, "sum", named), profiler:
        train(steps)
    events: Any = profiler.events()
    wanted = "CUDA" if on_gpus else "CPU"
    return compute_and_comm_fractions(
        (event.time_range.start, event.time_range.end, _is_collective(event))
        for event in events
        if event.device_type.name == wanted
        and event.time_range.end > event.time_range.start
    )


def _is_collective(event: Any) -> bool:
    """Return True for a collective or a part of one."""
    while event is not None:
        if event.name.startswith(_COLLECTIVE_EVENTS):
            return True
        event = event.cpu_parent
    return False


def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))
