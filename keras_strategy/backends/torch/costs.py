"""Costs of a training step on torch: predicted for `plan`, and counted.

A plan uses fake tensors, the units of weights and the buffers of a step. In it, each
device has a process.
"""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_strategy.backends.threads.patches_sharding import (
    can_scatter,
    new_sharding,
    plan_slots,
    slot_origin,
    unshardable_error,
)
from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.gradient_buckets import (
    MAX_BUCKET_BYTES,
    bucket_by_size,
)
from keras_strategy.backends.torch.patches_optimizers import Adam, updates_in_groups
from keras_strategy.backends.torch.sharding import (
    UNIT_BYTES,
    even_shards,
    group_into_units,
)
from keras_strategy.backends.torch.state import Layout
from keras_strategy.core.protocols import PlannedChoice, StepTrace
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.variables_optimizers import byte_count, stored_value
from keras_strategy.training.reduction import compute_and_comm_fractions
from keras_strategy.training.sharding import set_flat_shards


class _LiveBytes(TorchDispatchMode):
    """Count of the bytes of live fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = self.gradients = self.most_lean = 0
        self._sizes: dict[int, Any] = {}
        # Indices of weights by the storages of them and of copies in other dtypes.
        self.weights: dict[int, int] = {}
        self.casts: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # such as a seed, which has no value
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        if func is torch.ops.aten._to_copy.default and _key(args[0]) in self.weights:
            index = self.weights[_key(result)] = self.weights[_key(args[0])]
            self.casts[index] = result.nbytes
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def forget(_: Any) -> None:
            self.live -= size
            del self._sizes[key]
            self.weights.pop(key, None)

        if key not in self._sizes:
            self._sizes[key] = weakref.ref(storage, forget)
            self.live += size
            self.most = max(self.most, self.live)
            self.most_lean = max(self.most_lean, self.live - self.gradients)

    def note_gradient(self, weight: torch.Tensor) -> None:
        self.gradients += weight.nbytes

    def restart(self) -> int:
        """Return the live bytes, and count the most from there."""
        self.most = self.most_lean = self.live
        return self.live


_bytes = _LiveBytes()


def _key(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())


def without_memory(fn: Callable[[], Any]) -> Any:
    _bytes.__init__()
    with FakeTensorMode(allow_non_fake_inputs=True), _bytes:
        return fn()


def trace_step(
    forward: Callable[[Any], Iterator[Any]],
    weights: Sequence[torch.Tensor],
    apply: Callable[[Any], Any],
) -> StepTrace:
    weights = [torch.nn.Parameter(w, w.is_floating_point()) for w in weights]
    originals = {_key(weight): index for index, weight in enumerate(weights)}
    _bytes.weights = dict(originals)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[_key(tensor)] = tensor.untyped_storage()
        return tensor

    for weight in filter(lambda weight: weight.requires_grad, weights):
        weight.register_post_accumulate_grad_hook(_bytes.note_gradient)
    gc.collect()  # garbage that is freed in the step would hide what it allocates
    before = _bytes.restart()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        steps = map(pytree.tree_leaves, forward(weights))
        outputs, forward_most = next(steps), _bytes.most - before
        (loss,) = steps
    sizes = [x.nbytes() for key, x in saved.items() if key not in originals]
    read = frozenset(_bytes.weights[key] for key in saved if key in _bytes.weights)
    saved.clear()
    torch.autograd.backward(loss, [torch.ones_like(x) for x in loss])
    most, lean = _bytes.most - before, _bytes.most_lean - before
    before = _bytes.restart()
    with torch.no_grad():
        apply([weight.grad for weight in weights])
    update, kept = _bytes.most - before, sum([x.nbytes for x in outputs])
    most_of = forward_most, most, lean
    return StepTrace(sum(sizes), kept, *most_of, update, _bytes.casts, read)


def predict(
    weights: Sequence[Any],
    slots: Sequence[Any],
    optimizer: Any,
    replicas: int,
    shard: str | None,
    trace: StepTrace | None,
) -> PlannedChoice:
    share, is_several = (replicas - 1) / replicas, replicas > 1
    known = trace or StepTrace(0)
    # The fused kernel has no temporaries.
    update = 0 if is_several and isinstance(optimizer, Adam) else known.update
    if is_several and shard == "parameters":
        owners = {slot_origin(slot)[0] for slot in slots} - {None} or {optimizer}
        shardings = [new_sharding(owner, replicas) for owner in owners]
        if None in shardings:
            note = str(unshardable_error(optimizer))
            return PlannedChoice(shard, fits=False, note=note)
        stored, units, collectives, sent = _plan_units(
            weights, shardings, known, replicas
        )
        slot_bytes, _ = plan_slots(slots, replicas, shard)
        casts = sum([known.casts.get(index, 0) for index in known.saved])
        unit, sizes = max(units, default=0), (stored, stored, slot_bytes)
        update = _sharded_update(update, optimizer, weights, replicas)
        # Gradients come as activations go: the most is there at one end of backward.
        late = stored + known.outputs + max(2 * unit, update)
        early = max(stored + known.most_forward, known.most_lean) - casts + unit
        peak = max(early, late)
    else:
        size = sum(map(byte_count, weights))
        slot_bytes, is_sharded = plan_slots(slots, replicas, shard)
        scatters, buckets = is_sharded and can_scatter(optimizer), _buckets(weights)
        has_gpus = bool(get_engine().list_devices("gpu"))
        collectives = len(buckets) if scatters or has_gpus else 1
        collectives += len(buckets) * is_sharded
        sent = size * (2 if scatters or not is_sharded else 3)
        if is_sharded:
            update = _sharded_update(update, optimizer, weights, replicas)
            # While new weights are gathered: the bucket before, the received one, and
            # two copies of the shards that are sent.
            pairs = zip([0, *buckets], buckets, strict=False)
            gathers = [last + new + 2 * new // replicas for last, new in pairs]
            update = max(update, *gathers)
            if scatters:
                # While gradients are summed: a bucket that is sent, another one that is
                # received, and the shards of the sums, which the update reads.
                pairs = zip(buckets, itertools.accumulate(buckets), strict=True)
                reductions = [2 * new + summed // replicas for new, summed in pairs]
                update = max(update + size // replicas, *reductions)
        # The buffer of an all-reduce is kept for the next step.
        kept = size if is_several and not scatters else 0
        sizes = size, size, slot_bytes
        # The last step's gradients are there until the outputs are.
        most_whole = max(known.most_forward, known.outputs + update)
        peak = kept + max(known.most, size + most_whole)
    return PlannedChoice(
        shard,
        *sizes,
        peak=None if trace is None else peak,
        collectives=collectives * is_several,
        sent=round(share * sent),
    )


def _sharded_update(
    update: int, optimizer: Any, weights: Sequence[Any], replicas: int
) -> int:
    """Return the bytes that a replica needs while it updates its shards."""
    if not updates_in_groups(optimizer):
        return update // replicas
    size = group = most = 0
    for shard in [byte_count(weight) // replicas for weight in weights]:
        size, group = size + shard, group + shard
        most = max(most, group)
        group = 0 if group >= UNIT_BYTES else group
    return update // replicas * most // max(size, 1)


def _buckets(weights: Sequence[Any]) -> list[int]:
    """Return the bytes of the buckets in which weights or their gradients are sent."""
    values = list(map(stored_value, weights))
    buckets = bucket_by_size(values, MAX_BUCKET_BYTES)
    return [sum([values[index].nbytes for index in bucket]) for bucket in buckets]


def _plan_units(
    weights: Sequence[Any], shardings: list[Any], trace: StepTrace, replicas: int
) -> tuple[int, list[int], int, int]:
    """Return a replica's bytes, the units' bytes, and the collectives and all bytes."""
    units = list(group_into_units(weights))
    by_weight = next((x for x in shardings if not x.elementwise), None)
    indices = {id(weight): index for index, weight in enumerate(weights)}
    local, sizes, collectives, sent = [0] * replicas, [], 0, 0
    for unit in units:
        shards = even_shards([tuple(weight.shape) for weight in unit], replicas)
        if by_weight is not None:
            shards = [by_weight.whole_on_owner(w, tuple(w.shape)) for w in unit]
        gathered = size = 0
        is_read_again = False
        for weight, spec in zip(unit, shards, strict=True):
            set_flat_shards(weight, spec)
            index, itemsize = indices.pop(id(weight)), stored_value(weight).itemsize
            for replica in range(replicas):
                local[replica] += spec.size_of(replica) * itemsize
            size += byte_count(weight)
            gathered += trace.casts.get(index, byte_count(weight))
            is_read_again |= index in trace.saved
        # The last unit is still there when the backward pass begins.
        passes = 1 + (is_read_again and unit is not units[-1])
        collectives += passes + len(_buckets(unit))
        sent += passes * gathered + size
        sizes.append(max(size, gathered))
    whole = sum([byte_count(weights[index]) for index in indices.values()])
    return max(local) + whole, sizes, collectives, sent + 2 * whole


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
