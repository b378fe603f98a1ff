"""Costs of a training step on torch. In a plan, each device has a process."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import torch
from keras import tree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from keras_strategy.backends.torch import gradient_buckets
from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.patches_optimizers import Adam
from keras_strategy.backends.torch.sharding import attach_unit_shards
from keras_strategy.backends.torch.state import Layout
from keras_strategy.core.protocols import PlannedStep, TimeFractions
from keras_strategy.keras_patches import sharded_slots
from keras_strategy.keras_patches.internals import stored_dtype
from keras_strategy.training.reduction import compute_and_comm_fractions


class _LiveBytes(FakeTensorMode):
    """Fake tensors, whose bytes count while they live."""

    most, sizes = 0, WeakIdKeyDictionary()  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # such as a seed, which has no value
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in filter(torch.is_tensor, pytree.tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                _LiveBytes.most = max(self.most, sum(self.sizes.values()))
        return result


def without_memory(fn: Callable[[], Any]) -> Any:
    with _LiveBytes(allow_non_fake_inputs=True):
        return fn()


def local_bytes(step: PlannedStep) -> tuple[int, int]:
    if step.shard == "parameters":
        by_weight = sharded_slots.sharding_by_weight(step)
        attach_unit_shards(step.weights, step.replicas, by_weight)
    return sharded_slots.local_bytes(step)


def measure_step(step: PlannedStep) -> int | str:
    if step.shard is not None:
        return "torch measures it for shard=None only."

    def zeros(x: Any) -> Any:
        return keras.ops.zeros(x.shape, stored_dtype(x))

    values = map(zeros, step.weights)
    parameters = [torch.nn.Parameter(x, x.is_floating_point()) for x in values]
    others = tree.map_structure(zeros, (list(step.states), step.inputs(step.rows)))
    buffers = gradient_buckets.FlatBufferPool()

    def train() -> None:
        loss, _outputs = step.loss_of(parameters, *others)  # kept for the logs
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        pairs: Any = zip([p.grad for p in parameters], step.weights, strict=True)
        gradients, trained = zip(*[p for p in pairs if p[0] is not None], strict=True)
        if step.replicas > 1:
            flat = buffers.take(sum(map(torch.numel, gradients)), gradients[0])
            gradient_buckets.write_weighted(flat, gradients, None)
            gradients = gradient_buckets.unflatten(flat, gradients)
        # The fused kernel of replicas has no temporaries.
        if step.replicas == 1 or not isinstance(step.optimizer, Adam):
            with torch.no_grad():
                step.optimizer.apply(gradients, trained)

    gc.collect()  # garbage that is freed in the step would hide what it allocates
    before = _LiveBytes.most = sum(_LiveBytes.sizes.values())
    for _ in range(2):  # the second keeps the buffers of the first
        train()
    return _LiveBytes.most - before


# The names of collectives in torch's profiler, and of functions that have several.
_CALLS = ("c10d::", "keras_strategy::")
_EVENTS = (*_CALLS, "gloo:", "nccl:", "ncclDevKernel", "mpi:")


def profile(train: Callable[[int], None], steps: int) -> TimeFractions | None:
    # On CPUs in any thread, since replicas of one process take turns.
    wanted = "CUDA" if torch.cuda.is_available() else "CPU"
    api: Any = torch.profiler
    everywhere = api._ExperimentalConfig(profile_all_threads=True)
    kinds = {api.ProfilerActivity.CPU, getattr(api.ProfilerActivity, wanted)}
    profiler = api.profile(activities=kinds, experimental_config=everywhere)
    with contextlib.ExitStack() as stack, profiler:
        for owner, name in ((Layout, "sum"), (TorchWorkers, "start_gather")):
            function = api.record_function(f"keras_strategy::{name}")(
                getattr(owner, name)
            )
            stack.enter_context(mock.patch.object(owner, name, function))
        train(steps)
    spans, collectives = [], 0
    for event in profiler.events():
        time, is_part = event.time_range, _is_collective(event.cpu_parent)
        collectives += event.name.startswith(_CALLS) and not is_part
        if event.device_type.name == wanted and time.end > time.start:
            spans.append((time.start, time.end, _is_collective(event)))
    fractions = compute_and_comm_fractions(spans)
    return fractions and TimeFractions(*fractions, collectives)


def _is_collective(event: Any) -> bool:
    """Return True for a collective or a part of one."""
    return event is not None and (
        event.name.startswith(_EVENTS) or _is_collective(event.cpu_parent)
    )
