"""A replica on torch: its collectives, random numbers, reads and writes.

Several replicas of a process are threads that take turns, and stage what they write.
The only replica of a process writes in place, as Keras does on one device. It copies
what it overwrites first, and restores it if its function fails.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_strategy.backends.threads.patches import (
    current_stateless_scope,
    current_thread_replica,
)
from keras_strategy.backends.threads.pool import TurnScheduler
from keras_strategy.backends.threads.replica import ThreadReplica
from keras_strategy.backends.threads.scopes import WritesInPlace, unbuilt_variable_error
from keras_strategy.backends.torch.collectives import map_flattened
from keras_strategy.backends.torch.sharding import shard_only_gradient
from keras_strategy.backends.torch.state import (
    COMPONENTS,
    Components,
    StagedWriteScope,
    full_values,
    get_or_create_components,
    sum_tensors,
)
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import ReplicaAttributes
from keras_strategy.core.step_state import row_ranges
from keras_strategy.keras_patches.patch import multi_replica_only
from keras_strategy.keras_patches.random import dry_run_layer, layer_draws
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.training.reduction import cast_for_sum, check_same_dtype
from keras_strategy.training.sharding import OPTIMIZER_SHARDING, gradient_shards
from keras_strategy.training.train_step import find_batch_rows
from keras_strategy.values import (
    PerReplica,
    ReduceOp,
    map_leaves,
    regroup,
    select_replica,
)

PARTIAL_UPDATE_NOTE = (
    "keras_strategy: the training step had begun to update the variables. They are "
    "the same on all replicas, but may be partly updated: load them again from a "
    "checkpoint before you go on."
)

# Large and odd, so that the seeds of replicas and of consecutive runs differ.
_SEED_STRIDE = 0x9E3779B1
_clone_all: Callable[..., Any] = torch._foreach_clone  # pyright: ignore


class RunState:
    """State that the replicas of one `strategy.run` share."""

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._seed: int | None = None
        # What the first replica drew, and how many others still have to take it.
        self._drawn: dict[Any, list[Any]] = {}

    def draw_once(
        self,
        index: int,
        key: Any,
        draw: Callable[[], torch.Tensor],
        skip: Callable[[], Any],
    ) -> torch.Tensor:
        """Draw a tensor that is equal on all replicas, once if they share memory.

        The key identifies the draw in the run. Replica 0 comes first, and the others
        call `skip`.
        """
        entry = self._drawn.get(key)
        if index == 0 or entry is None:
            tensor = draw()
            if index == 0 and self._replicas > 1 and tensor.device.type == "cpu":
                self._drawn[key] = [self._replicas - 1, tensor]
            return tensor
        skip()
        entry[0] -= 1
        if entry[0] == 0:
            del self._drawn[key]
        return entry[1]

    def generator(self, replica_id: int, device: torch.device) -> torch.Generator:
        """Return a replica's substitute for torch's process-wide generator.

        It is seeded by the process's, whose state is equal on all workers and advances
        only if a replica draws.
        """
        if self._seed is None:
            self._seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(device=device)
        return generator.manual_seed((self._seed + replica_id * _SEED_STRIDE) % 2**63)


class TorchReplica(ThreadReplica):
    """A replica that is a thread and stages what it writes.

    Args:
        group: The group of replicas.
        index: Its index on this worker.
        turns: The scheduler of this worker's replicas.
        attributes: What this replica sets on layers.
        run: The state of the run.
    """

    def __init__(
        self,
        group: Any,
        index: int,
        turns: TurnScheduler,
        attributes: ReplicaAttributes,
        run: RunState,
    ):
        super().__init__(group.strategy, index, group.topology, turns, attributes)
        self._group = group
        self.scope = self.make_scope(group, index, run)
        self._run = run
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draws = 0
        self._updating: Any = None

    def make_scope(self, group: Any, index: int, run: RunState) -> Any:
        """Return the scope through which the replica sees the variables."""
        return StagedWriteScope(self, index, group.layout, run)

    def set_rows(self, batch: Any) -> None:
        """Set which rows of the global batch the step has, if they are known."""
        if batch is not None and batch.counts is not None:
            self.step.rows = row_ranges(batch.counts)[batch.first + self.index]
            self.step.draws, self.step.dry_run = layer_draws, dry_run_layer

    def sees_replica_variables(self) -> bool:
        """Return True if this thread reads and writes the replica's own tensors."""
        return current_stateless_scope() is (self._updating or self.scope)

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that the optimizer may write, in place."""
        scope = self._updating or self.scope
        return [scope.get_current_value(variable) for variable in variables]

    @contextlib.contextmanager
    def updating(self, scope: Any) -> Iterator[None]:
        """Context manager in which the optimizer sees variables through a scope."""
        self._updating = scope
        try:
            yield
        finally:
            self._updating = None

    def gather_shards(
        self, name: str, shard: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Join the replicas' flat tensors; the result must not be modified.

        Args:
            name: What they are for.
            shard: This replica's.
            sizes: Each replica's number of elements; the same list on all of them.
        """
        workers = self._group.workers

        def combine(shards):
            joined = torch.cat([shard.to(shards[0].device) for shard in shards])
            if workers is None:
                return joined
            local = len(shards)
            by_worker = [sum(sizes[i : i + local]) for i in range(0, len(sizes), local)]
            return workers.all_gather_flat(name, joined, by_worker)

        return self.here(self.exchange(name, shard, combine))

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.scope.device)

    def add(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum_tensors(tensors)

    def sum_over_workers(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        workers = self._group.workers
        return tensor if workers is None else workers.sum(name, tensor)

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas, a new tensor."""
        workers = self._group.workers
        if workers is not None and len(self._group.devices) == 1:
            return workers.sum(name, tensor)
        total = self.total(name, tensor.detach())
        return total.to(tensor.device, copy=True)

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> torch.Tensor:
        tensor = cast_for_sum(value)
        total = _AllReduce.apply(tensor, self, self.step.row_weight)
        if reduce_op is ReduceOp.MEAN:
            return total / self._group.topology.num_replicas
        return total

    def all_gather(self, value: Any, axis: int) -> torch.Tensor:
        tensor = keras.ops.convert_to_tensor(value)
        return _AllGather.apply(tensor, self, axis, self.step.row_weight)

    def weighted_sum(
        self, tensors: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor]:
        def sum_weighted(flat: torch.Tensor) -> torch.Tensor:
            if weight == 0:
                flat = flat.zero_()  # it is a fresh copy
            elif weight is not None:
                is_inexact = flat.is_floating_point() or flat.is_complex()
                flat = flat.mul_(weight) if is_inexact else flat * weight
            return self.sum("optimizer.apply", flat)

        with torch.no_grad():
            return map_flattened(
                [
                    t if type(t) is torch.Tensor else keras.ops.convert_to_tensor(t)
                    for t in tensors
                ],
                sum_weighted,
            )

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.scope.add_update((variable, value))

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        number, self._draws = self._draws, self._draws + 1
        return self._run.draw_once(self.index, (number, what), draw, skip)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this replica's substitute for torch's process-wide generator."""
        if device not in self._generators:
            self._generators[device] = self._run.generator(self.id, device)
        return self._generators[device]

    def dropout_mask(self, inputs: torch.Tensor, keep: float) -> torch.Tensor:
        """Draw the factors of dropout: 0, or 1 / keep with probability `keep`."""
        mask = torch.empty_like(inputs, requires_grad=False)
        generator = self.generator(inputs.device)
        return mask.bernoulli_(keep, generator=generator).div_(keep)


def returned_variable(
    replicas: Sequence[TorchReplica], variables: Sequence[keras.Variable]
) -> PerReplica:
    """Return the values of a variable that the replicas' function returned."""
    pairs = zip(replicas, variables, strict=True)
    values = [replica.scope.get_current_value(variable) for replica, variable in pairs]
    values = [value.detach().clone() for value in values if value is not None]
    return PerReplica(full_values(variables[0], values))


class _AllReduce(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced as well."""

    @staticmethod
    def forward(ctx: Any, tensor, replica: TorchReplica, weight: float | None):
        ctx.replica, ctx.weight = replica, weight
        return replica.sum("all_reduce", tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name = "gradient of all_reduce"
        total = _GradientOfSum.apply(gradients[0], ctx.replica, name, ctx.weight)
        return total, None, None


class _GradientOfSum(torch.autograd.Function):
    """All-reduce of the gradients of an all-reduced value.

    In a training step the optimizer multiplies by the row weight w_r afterwards, so the
    result is (sum over s of w_s * g_s) / w_r. Its gradient is an `_AllReduce`, by the
    same rule.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient, replica: TorchReplica, name: str, weight: float | None
    ):
        ctx.replica, ctx.weight = replica, weight
        if weight is None:
            return replica.sum(name, gradient)
        weighted = gradient * weight if weight > 0 else torch.zeros_like(gradient)
        total = replica.sum(name, weighted)
        return total / weight if weight > 0 else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        has_rows = ctx.weight is None or ctx.weight > 0
        gradient = gradients[0] if has_rows else torch.zeros_like(gradients[0])
        return _AllReduce.apply(gradient, ctx.replica, ctx.weight), None, None, None


class _AllGather(torch.autograd.Function):
    """All-gather; a replica's gradient is its rows of the all-reduced one."""

    @staticmethod
    def forward(
        ctx: Any, tensor, replica: TorchReplica, axis: int, weight: float | None
    ):
        def combine(tensors):
            check_same_dtype(tensors)
            device = tensors[0].device
            try:
                joined = torch.cat([t.to(device) for t in tensors], dim=axis)
            except (RuntimeError, IndexError) as error:
                shapes = [tuple(t.shape) for t in tensors]
                raise ValueError(
                    "`all_gather` needs values of rank 1 or more whose dimensions "
                    f"other than axis={axis} are equal. Received the shapes "
                    f"{shapes}, in the order of the replicas."
                ) from error
            sizes = [t.shape[axis] for t in tensors]
            if workers is None:
                return joined, sizes
            joined, _ = workers.gather("all_gather", joined, axis)
            local_sizes = torch.tensor(sizes, device=joined.device)
            return joined, workers.gather("all_gather", local_sizes, 0)[0].tolist()

        workers = replica._group.workers
        joined, sizes = replica.exchange("all_gather", tensor.detach(), combine)
        ctx.replica, ctx.axis, ctx.sizes, ctx.weight = replica, axis, sizes, weight
        return joined.to(tensor.device, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name = "gradient of all_gather"
        total: Any = _GradientOfSum.apply(gradients[0], ctx.replica, name, ctx.weight)
        local = total.split(ctx.sizes, dim=ctx.axis)[ctx.replica.id]
        return local, None, None, None


class InPlaceScope:
    """The variables of an `InPlaceReplica`, for a `merge_call`."""

    def __init__(self, replica: "InPlaceReplica", device: str):
        self.device = device
        self._replica = replica

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        if stored_value(variable) is None:
            return None
        return self._replica.note_read(variable).first

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        self._replica.assign(*update)


class InPlaceReplica(WritesInPlace, TorchReplica):
    """The only replica of a process, which writes the variables in place.

    Attributes:
        overwritten: The tensors that were overwritten and copies of their old values,
            by `id`.
        is_partly_updated: True if a training step has begun to update the variables, of
            which it keeps no copies.
    """

    scope: Any

    def __init__(self, group: Any):
        super().__init__(group, 0, TurnScheduler(1), ReplicaAttributes({}), RunState())
        self.layout, self.device = group.layout, group.torch_devices[0]
        self.buffers = group.buffers
        self.overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_partly_updated = False

    def make_scope(self, group: Any, index: int, run: RunState) -> InPlaceScope:
        return InPlaceScope(self, group.torch_devices[index])

    def note_read(self, variable: Any) -> Components:
        """Record that the replica reads a variable, and return its components."""
        components = get_or_create_components(variable, self.layout)
        if variable.aggregation == "sum":
            self.step.sum_variables_read.add(id(variable))
        if self.step.is_applying:
            # Keras's torch optimizers work in place, on what they read.
            self._save([components.first])
        return components

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Assign a value to a variable."""
        tensor = stored_value(variable)
        if tensor is None:
            raise unbuilt_variable_error(variable)
        components = vars(variable).get(COMPONENTS)
        if (
            components is None
            or components.first is not tensor
            or components.layout is not self.layout
        ):
            # Which first splits a sum over the replicas.
            components = get_or_create_components(variable, self.layout)
        if components.shards is not None:
            value = components.local_shard(value, 0)
        if id(tensor) not in self.overwritten:
            self._save([tensor])
        with torch.no_grad():
            tensor.copy_(value)

    def sees_replica_variables(self) -> bool:
        return current_stateless_scope() is self._updating

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if self._updating is not None:
            return super().tensors_to_update(variables)
        tensors = []
        for variable in variables:  # inline, since it is called in each step
            tensor, components = stored_value(variable), vars(variable).get(COMPONENTS)
            if (
                components is None
                or components.first is not tensor
                or components.layout is not self.layout
            ):
                get_or_create_components(variable, self.layout)
            tensors.append(tensor)
        self._save(tensors)
        return tensors

    def _save(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors that are about to be overwritten."""
        if self.step.is_applying and self.step.row_weight is not None:
            self.is_partly_updated = True
            return
        fresh = [tensor for tensor in tensors if id(tensor) not in self.overwritten]
        if not fresh:
            return
        copies = _clone_all([tensor.detach() for tensor in fresh])
        for tensor, copy in zip(fresh, copies, strict=True):
            self.overwritten[id(tensor)] = tensor, copy

    def weighted_sum(
        self, tensors: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor]:
        kinds = {
            (t.dtype, t.device) if type(t) is torch.Tensor else None for t in tensors
        }
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None or not kind[0].is_floating_point:
            return super().weighted_sum(tensors, weight)
        workers, name = self._group.workers, "optimizer.apply"
        variables, optimizer = self.step.reducing_gradients_of, self.step.optimizer
        shards = None
        if (
            optimizer is not None
            and OPTIMIZER_SHARDING in vars(optimizer)
            and self.sees_replica_variables()
            and not workers.overlapped.can_overlap(tensors)
        ):
            shards = gradient_shards(optimizer, tensors, variables)
        with torch.no_grad():
            if shards is None:
                return workers.all_reduce_weighted(
                    name, tensors, weight, self.buffers, variables
                )
            sums = workers.reduce_scatter_weighted(name, tensors, weight, shards)
            return list(map(shard_only_gradient, tensors, sums))

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call a function, and undo all of its effects if it fails."""
        batch = find_batch_rows(args, kwargs)
        if batch is not None and batch.counts is not None:
            self.step.rows = row_ranges(batch.counts)[batch.first]
            self.step.draws, self.step.dry_run = layer_draws, dry_run_layer
        overlapped = self._group.workers.overlapped
        try:
            overlapped.replica = self
            with self._group.device_scopes[0](), context.replica_scope(self.context):
                self._attributes.swap_in()
                args, kwargs = self._group.arrays_to_tensors(
                    select_replica((args, kwargs), 0, 1)
                )
                outputs = self._outputs(fn(*args, **kwargs))
            self._attributes.keep()
            return outputs
        except BaseException as error:
            self._attributes.swap_out()
            with torch.no_grad():
                for tensor, value in self.overwritten.values():
                    tensor.copy_(value)
            if self.is_partly_updated:
                error.add_note(PARTIAL_UPDATE_NOTE)
            raise
        finally:
            overlapped.replica = None
            self.overwritten.clear()  # the replica is part of a reference cycle

    def _outputs(self, output: Any) -> Any:
        if self.overwritten:
            written = {_memory(tensor) for tensor, _ in self.overwritten.values()}
            output = map_leaves(functools.partial(_copy_if_in, written), output)
        return regroup(
            [output],
            torch.is_tensor,
            always_distributed=True,
            join_variables=functools.partial(returned_variable, [self]),
        )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy_if_in(written: set[int], leaf: Any) -> Any:
    """Copy a returned value if later runs will write to its memory."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.clone() if _memory(leaf) in written else leaf
    if isinstance(leaf, np.ndarray) and not leaf.flags.owndata:
        return leaf.copy()  # it may be a view of a tensor
    return leaf


@multi_replica_only
def in_place_replica() -> InPlaceReplica | None:
    """Return the running replica if it must see reads and writes."""
    replica = context.distributed_replica()
    if isinstance(replica, InPlaceReplica) and current_thread_replica() is replica:
        return replica
    return None
