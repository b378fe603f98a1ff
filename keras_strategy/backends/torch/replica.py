"""A replica on torch: its collectives, random numbers, reads and writes.

Several replicas of a process take turns, and stage what they write.
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
    ReplicaScope,
    unbuilt_variable_error,
)
from keras_strategy.backends.threads.pool import TurnScheduler
from keras_strategy.backends.threads.replica import ThreadReplica
from keras_strategy.backends.torch.collectives import map_flattened
from keras_strategy.backends.torch.gradient_buckets import unflatten, write_weighted
from keras_strategy.backends.torch.state import (
    Components,
    GradientTerm,
    ShardedGradient,
    ShardedWriteScope,
    StagedWriteScope,
    get_or_create_components,
)
from keras_strategy.backends.torch.variables import COMPONENTS
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import (
    ReplicaAttributes,
    set_on_all_replicas,
)
from keras_strategy.core.step_state import BatchRows, active_recorder, row_ranges
from keras_strategy.keras_patches.internals import current_stateless_scope, stored_value
from keras_strategy.keras_patches.random import dry_run_layer, layer_draws
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.training.sharding import OPTIMIZER_SHARDING, gradient_shards
from keras_strategy.training.variable_sync import average_statistics
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
# torch 2.11 has no such function.
_clone_all: Callable[..., Any] = getattr(
    torch, "_foreach_clone", lambda tensors: [tensor.clone() for tensor in tensors]
)


class TorchReplica(ThreadReplica):
    """One of several replicas of a process, which stages what it writes."""

    def __init__(
        self,
        group: Any,
        index: int,
        turns: TurnScheduler,
        attributes: ReplicaAttributes,
        batch: BatchRows | None,
    ):
        super().__init__(
            group.strategy, index, group.topology, group.workers, turns, attributes
        )
        self._group = group
        self.scope = self.make_scope()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draws = 0
        self._updating: Any = None
        self.unit_reads: Any = None  # if the strategy shards weights
        if group.layout.shares_tensors:
            self.share_update = self._share_update
        if batch is not None and batch.counts is not None:
            self.step.rows = row_ranges(batch.counts)[batch.first + index]
            self.step.draws, self.step.dry_run = layer_draws, dry_run_layer

    def make_scope(self) -> Any:
        # Variables refer to this object of the run, so it must not hold its results.
        is_sharded = self._group.units is not None
        scope = ShardedWriteScope if is_sharded else StagedWriteScope
        return scope(self, self._group.layout, self._turns.drawn)

    def sees_replica_variables(self) -> bool:
        """Return True if this thread reads and writes the replica's own tensors."""
        return current_stateless_scope() is (self._updating or self.scope)

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that the optimizer may write, in place."""
        if self._updating is None:
            return list(map(self.scope.local_value, variables))
        return list(map(self._updating.get_current_value, variables))

    @contextlib.contextmanager
    def updating(self, scope: Any) -> Iterator[None]:
        """Let the optimizer see variables through a scope."""
        self._updating = scope
        try:
            yield
        finally:
            self._updating = None

    def gather_updates(self, shard: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Join the replicas' flat tensors of given sizes; do not modify the result."""
        workers = self.workers

        def combine(shards):
            joined = torch.cat([shard.to(shards[0].device) for shard in shards])
            if workers is None:
                return joined
            local = len(shards)
            by_worker = [sum(sizes[i : i + local]) for i in range(0, len(sizes), local)]
            # The sum of the gradients has shown that all workers are here.
            return workers.gather_rows("optimizer.apply", joined, by_worker)

        return self.here(self.exchange("optimizer.apply", shard, combine))

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.scope.device)

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._group.layout.sum(name, tensors)

    def _share_update(self, apply: Callable[[Any], Any], gradients: list[Any]) -> Any:
        """Let the replica that owns a device's tensors update them for all on it."""
        result = None
        owner = self._group.layout.owners[self.index]
        if owner == self.index:
            with set_on_all_replicas():
                result = apply(gradients)
        updates = self.exchange("the update", (self.scope, result), list)
        scope, result = updates[owner]
        if owner != self.index:
            self.scope.adopt_updates(scope)
        return result

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas, a new tensor."""
        layout = self._group.layout
        if len(layout.devices) == 1:
            return layout.sum(name, [tensor])
        total = self.total(name, tensor.detach())
        return total.to(tensor.device, copy=True)

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> torch.Tensor:
        tensor = cast_for_sum(value)
        total = _AllReduce.apply(tensor, self, self.step.row_weight, None)
        if reduce_op is ReduceOp.MEAN:
            return total / self._group.topology.num_replicas
        return total

    def all_gather(self, value: Any, axis: int) -> torch.Tensor:
        tensor = keras.ops.convert_to_tensor(value)
        return _AllGather.apply(tensor, self, axis, self.step.row_weight)

    def weighted_sum(
        self, tensors: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor]:
        sharded = [t for t in tensors if isinstance(t, ShardedGradient)]
        if sharded:
            self._sum_terms(sharded)
            whole = [t for t in tensors if not isinstance(t, ShardedGradient)]
            sums = iter(self.weighted_sum(whole, weight) if whole else ())
            if active_recorder(self._strategy) is not None:
                sharded = list(map(self._gather_gradient, sharded))
            totals = iter(sharded)
            return [
                next(totals if isinstance(t, ShardedGradient) else sums)
                for t in tensors
            ]

        def sum_weighted(flat: torch.Tensor) -> torch.Tensor:
            if weight == 0:
                flat = flat.zero_()  # it is a fresh copy
            elif weight is not None:
                is_inexact = flat.is_floating_point() or flat.is_complex()
                flat = flat.mul_(weight) if is_inexact else flat * weight
            return self.sum(self.step.reduction, flat)

        convert = keras.ops.convert_to_tensor
        with torch.no_grad():
            return map_flattened(
                sum_weighted,
                [
                    # Sparse gradients have other rows on each replica.
                    (t if type(t) is torch.Tensor else convert(t)).to_dense()
                    for t in tensors
                ],
            )

    def _gather_gradient(self, gradient: ShardedGradient) -> torch.Tensor:
        with torch.no_grad():
            shard = gradient.shard(self.id).reshape(-1)
            return self.all_gather(shard, 0).view(gradient.shape)

    def _sum_terms(self, gradients: Sequence[ShardedGradient]) -> None:
        """Complete sums of gradients, when all replicas have added their own."""
        terms = [term for gradient in gradients for term in gradient.terms]
        workers = self.workers

        def combine(by_replica: Sequence[list[GradientTerm]]) -> None:
            if any(others != terms for others in by_replica):
                raise RuntimeError(
                    "All replicas must pass gradients of the same backward passes to "
                    "`optimizer.apply`, in the same order of variables."
                )
            pending = [term for term in terms if not term.is_summed]
            if workers is not None and pending:
                workers.sum_shards(self.step.reduction, [t.shards for t in pending])
            for term in pending:
                term.is_summed = True

        self.exchange(self.step.reduction, terms, combine)

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.scope.add_update((variable, value))

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        # Replicas that share memory take the numbers of the one that comes first.
        drawn, key = self._turns.drawn, (self._draws, what)
        self._draws += 1
        entry = drawn.get(key)
        if entry is None:
            tensor = draw()
            others = len(self._group.devices) - 1
            if others and tensor.device.type == "cpu":
                drawn[key] = [others, tensor]
            return tensor
        skip()
        entry[0] -= 1
        if entry[0] == 0:
            del drawn[key]
        return entry[1]

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this replica's substitute for torch's process-wide generator."""
        # It is seeded by the process's, whose state is equal on all workers and
        # advances only if a replica draws.
        if device not in self._generators:
            if self._turns.seed is None:
                self._turns.seed = int(torch.randint(2**62, ()))
            seed = (self._turns.seed + self.id * _SEED_STRIDE) % 2**63
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


def returned_variable(
    replicas: Sequence[TorchReplica], variables: Sequence[keras.Variable]
) -> PerReplica:
    """Return the values of a variable that the replicas' function returned."""
    pairs = zip(replicas, variables, strict=True)
    values = [replica.scope.local_value(variable) for replica, variable in pairs]
    values = [value.detach().clone() for value in values if value is not None]
    components = vars(variables[0]).get(COMPONENTS)
    return PerReplica(values if components is None else components.full_values(values))


class _AllReduce(torch.autograd.Function):
    """All-reduce of values, or of the gradients of such a result."""

    # In a training step the optimizer multiplies gradients by the row weight w_r
    # afterwards, so their sum is (sum over s of w_s * g_s) / w_r. By the same rule each
    # of the two is the gradient of the other.

    @staticmethod
    def forward(
        ctx: Any,
        tensor,
        replica: TorchReplica,
        weight: float | None,
        gradient_of: str | None,
    ):
        ctx.replica, ctx.weight, ctx.is_gradient = replica, weight, bool(gradient_of)
        if gradient_of is None:
            return replica.sum("all_reduce", tensor)
        name = f"gradient of {gradient_of}"
        if weight is None:
            return replica.sum(name, tensor)
        weighted = tensor * weight if weight > 0 else torch.zeros_like(tensor)
        total = replica.sum(name, weighted)
        return total / weight if weight > 0 else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.is_gradient and ctx.weight is not None and ctx.weight <= 0:
            gradient = torch.zeros_like(gradient)
        name = None if ctx.is_gradient else "all_reduce"
        total = _AllReduce.apply(gradient, ctx.replica, ctx.weight, name)
        return total, None, None, None


class _AllGather(torch.autograd.Function):
    """All-gather; a replica's gradient is its rows of the all-reduced one."""

    @staticmethod
    def forward(
        ctx: Any, tensor, replica: TorchReplica, axis: int, weight: float | None
    ):
        joined, sizes = replica.gather(tensor.detach(), axis)
        ctx.replica, ctx.axis, ctx.sizes, ctx.weight = replica, axis, sizes, weight
        return joined.to(tensor.device, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total: Any = _AllReduce.apply(
            gradients[0], ctx.replica, ctx.weight, "all_gather"
        )
        local = total.split(ctx.sizes, dim=ctx.axis)[ctx.replica.id]
        return local, None, None, None


class InPlaceReplica(TorchReplica, ReplicaScope):
    """The only replica of a process, which is its own scope and writes in place."""

    scope: Any

    def __init__(self, group: Any, batch: BatchRows | None):
        super().__init__(group, 0, TurnScheduler(1), ReplicaAttributes({}), batch)
        ReplicaScope.__init__(self, self)
        self.layout, self.device = group.layout, group.torch_devices[0]
        self.buffers = group.buffers
        # What was overwritten and copies of the old values, by `id`.
        self.overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # True if a training step, which keeps no copies, has begun to update variables.
        self.is_partly_updated = False
        self.sums = 0  # all-reduces of this run

    def make_scope(self) -> "InPlaceReplica":
        return self

    def local_value(self, variable: Any) -> torch.Tensor | None:
        is_unbuilt = stored_value(variable) is None
        return None if is_unbuilt else self.note_read(variable).first

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        if stored_value(variable) is None:
            return None
        components = self.note_read(variable)
        first = components.first
        return first if components.shards is None else components.seen_value(first)

    def note_read(self, variable: Any) -> Components:
        """Record that the replica reads a variable, and return its components."""
        components = get_or_create_components(variable, self.layout)
        if variable.aggregation == "sum":
            self.step.sum_variables_read.add(id(variable))
        if self.step.is_applying:
            # Keras's torch optimizers work in place, on what they read.
            self._save([components.first])
        return components

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if stored_value(variable) is None:
            raise unbuilt_variable_error(variable)
        components = vars(variable).get(COMPONENTS)
        if components is None or components.layout is not self.layout:
            # Which first splits a sum over the replicas.
            components = get_or_create_components(variable, self.layout)
        if components.shards is not None:
            value = components.shard_to_write(self, value)
        tensor = components.first
        if id(tensor) not in self.overwritten:
            self._save([tensor])
        with torch.no_grad():
            tensor.copy_(value)

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if self._updating is not None:
            return super().tensors_to_update(variables)
        tensors = []
        for variable in variables:  # inline, since it is called in each step
            components = vars(variable).get(COMPONENTS)
            if components is None or components.layout is not self.layout:
                components = get_or_create_components(variable, self.layout)
            tensors.append(components.first)
        self._save(tensors)
        return tensors

    def _save(self, tensors: Sequence[torch.Tensor]) -> None:
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
            (t.layout, t.dtype, t.device) if type(t) is torch.Tensor else None
            for t in tensors
        }
        kind = kinds.pop() if len(kinds) == 1 else None
        if (
            kind is None
            or kind[0] is not torch.strided
            or not kind[1].is_floating_point
        ):
            return super().weighted_sum(tensors, weight)
        workers = self.workers
        if self.layout.topology.sums_in_tree:
            # Of another size than the sum, or one would take the other's buffer.
            size = sum(map(torch.numel, tensors))
            flat = self.buffers.take(size + 1, tensors[0])[:-1]
            with torch.no_grad():
                write_weighted(flat, tensors, weight)
                flat = workers.sum_in_tree(self.step.reduction, [flat], self.buffers)
            return unflatten(flat, tensors)
        variables, optimizer = self.step.reducing_gradients_of, self.step.optimizer
        shards = None
        if (
            optimizer is not None
            and OPTIMIZER_SHARDING in vars(optimizer)
            and self.sees_replica_variables()
            and active_recorder(self._strategy) is None
            and not workers.can_overlap(tensors[0].device)
        ):
            shards = gradient_shards(optimizer, tensors, variables)
        with torch.no_grad():
            if shards is None:
                return workers.all_reduce_weighted(
                    tensors, weight, self.buffers, variables
                )
            sums = workers.reduce_scatter_weighted(list(tensors), weight, shards)
            return [
                ShardedGradient(
                    tensor, [GradientTerm({self.id: shard}, is_summed=True)]
                )
                for tensor, shard in zip(tensors, sums, strict=True)
            ]

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call a function, and undo all of its effects if it fails."""
        workers = self.workers
        try:
            workers.replica = self
            scope = context.replica_scope(self.context)
            with self._group.device_scopes[0](), scope, self:
                self._attributes.swap_in()
                args, kwargs = self._group.arrays_to_tensors(
                    select_replica((args, kwargs), 0, 1)
                )
                result = fn(*args, **kwargs)
                if self.step.assigned:
                    average_statistics(self)
                outputs = self._outputs(result)
            self._attributes.swapped.clear()  # the only replica's values stay
            self._attributes.swap_out()
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
            workers.replica = None
            for kept in (self.overwritten, self.losses):
                kept.clear()  # the replica is part of a reference cycle

    def _outputs(self, output: Any) -> Any:
        """Return what `run` returns, copied where later runs write to its memory."""
        written = {_memory(tensor) for tensor, _ in self.overwritten.values()}

        def copy(leaf):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                return leaf.clone() if _memory(leaf) in written else leaf
            if isinstance(leaf, np.ndarray) and not leaf.flags.owndata:
                return leaf.copy()  # it may be a view of a tensor
            return leaf

        return regroup(
            [map_leaves(copy, output) if written else output],
            torch.is_tensor,
            always_distributed=True,
            join_variables=functools.partial(returned_variable, [self]),
        )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
