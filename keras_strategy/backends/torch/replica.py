"""What the replicas of one call of `strategy.run` have in common.

One replica: a thread, and what it asks of the others.

The only replica of a process, which writes to the variables themselves.

Nobody here computes beside it, so what it assigns need not be kept apart, and it runs
as Keras runs on one device. What it overwrites is noted first, and written back if its
function fails.
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
    ATTRIBUTE,
    Components,
    StagedWriteScope,
    get_or_create_components,
    sum_tensors,
    together,
)
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import ReplicaAttributes
from keras_strategy.core.step_state import row_ranges
from keras_strategy.keras_patches.patch import of_several
from keras_strategy.keras_patches.random import of_layers, rehearse_layer
from keras_strategy.keras_patches.variables_optimizers import stored
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
    "the same on all replicas, but may be half-updated: load them again from a "
    "checkpoint before you go on."
)

# Large and odd, so that the seeds of replicas and of consecutive runs stay apart.
_STRIDE = 0x9E3779B1


class RunState:
    """One call of `strategy.run`, the same object for all its replicas."""

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._seed: int | None = None
        # What the first replica drew: how many others have not come there, and what.
        self._drawn: dict[Any, list[Any]] = {}

    def draw_once(
        self,
        index: int,
        what: Any,
        draw: Callable[[], torch.Tensor],
        skip: Callable[[], Any],
    ) -> torch.Tensor:
        """Draws what replicas draw alike, once if their tensors are in one memory.

        Args:
            index: The number of the replica. The first comes first.
            what: Tells what it draws from other draws of the run.
            draw: Draws.
            skip: See `Replica.draw_once`.
        """
        found = self._drawn.get(what)
        if index == 0 or found is None:
            numbers = draw()
            if index == 0 and self._replicas > 1 and numbers.device.type == "cpu":
                self._drawn[what] = [self._replicas - 1, numbers]
            return numbers
        skip()
        found[0] -= 1
        if found[0] == 0:
            del self._drawn[what]
        return found[1]

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """A replica's own generator, for what Keras draws from the process's.

        Its state, which workers have in common, decides what all of them draw, and
        advances only if one asks.

        Args:
            index: The number of the replica.
            device: Where it draws.
        """
        if self._seed is None:
            self._seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(device=device)
        return generator.manual_seed((self._seed + index * _STRIDE) % 2**63)


class TorchReplica(ThreadReplica):
    """See `core.protocol.Replica`.

    Args:
        group: The group of replicas.
        index: This replica's number on this worker.
        turns: The turns of the replicas of this worker.
        own: What this replica sets on layers.
        run: The run, the same object for all its replicas.
    """

    def __init__(
        self,
        group: Any,
        index: int,
        turns: TurnScheduler,
        own: ReplicaAttributes,
        run: RunState,
    ):
        super().__init__(group.strategy, index, group.topology, turns, own)
        self._group = group
        self.scope = self.make_scope(group, index, run)
        self._run = run
        self._generators: dict[torch.device, torch.Generator] = {}
        self._drawn = 0
        self._updating: Any = None

    def make_scope(self, group: Any, index: int, run: RunState) -> Any:
        """Makes what the replica sees the variables through."""
        return StagedWriteScope(self, index, group.layout, run)

    def sees_replica_variables(self) -> bool:
        """Whether what this thread reads and writes is the replica's own."""
        return current_stateless_scope() is (self._updating or self.scope)

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of variables that the optimizer writes to, in place."""
        scope = self._updating or self.scope
        return [scope.get_current_value(variable) for variable in variables]

    @contextlib.contextmanager
    def updating(self, scope: Any) -> Iterator[None]:
        """Surrounds an optimizer that sees the variables through another scope."""
        self._updating = scope
        try:
            yield
        finally:
            self._updating = None

    def gather_shards(
        self, name: str, part: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """The replicas' tensors of one dimension, joined in their order.

        Args:
            name: What they are for.
            part: This replica's.
            sizes: How many elements each replica has; the same on all of them.

        Returns:
            A tensor that nobody may change.
        """
        workers = self._group.workers

        def combine(parts):
            joined = torch.cat([part.to(parts[0].device) for part in parts])
            if workers is None:
                return joined
            local = len(parts)
            each = [sum(sizes[i : i + local]) for i in range(0, len(sizes), local)]
            return workers.all_gather_flat(name, joined, each)

        return self.here(self.exchange(name, part, combine))

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.scope.device)

    def add(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum_tensors(tensors)

    def sum_over_workers(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        workers = self._group.workers
        return tensor if workers is None else workers.sum(name, tensor)

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas, a tensor of this replica's own."""
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
        def sum_of_weighted(flat: torch.Tensor) -> torch.Tensor:
            # It was made of the tensors just now, so that it may be changed in place.
            if weight == 0:
                flat = flat.zero_()
            elif weight is not None:
                exact = flat.is_floating_point() or flat.is_complex()
                flat = flat.mul_(weight) if exact else flat * weight
            return self.sum("optimizer.apply", flat)

        with torch.no_grad():
            return map_flattened(
                [
                    t if type(t) is torch.Tensor else keras.ops.convert_to_tensor(t)
                    for t in tensors
                ],
                sum_of_weighted,
            )

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.scope.add_update((variable, value))

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        number, self._drawn = self._drawn, self._drawn + 1
        return self._run.draw_once(self.index, (number, what), draw, skip)

    def generator(self, device: torch.device) -> torch.Generator:
        """This replica's part in place of torch's process-wide generator."""
        if device not in self._generators:
            self._generators[device] = self._run.generator(self.id, device)
        return self._generators[device]

    def dropout_mask(self, inputs: torch.Tensor, keep: float) -> torch.Tensor:
        """What dropout multiplies with: 0, or 1 / keep for the part that is kept."""
        mask = torch.empty_like(inputs, requires_grad=False)
        generator = self.generator(inputs.device)
        return mask.bernoulli_(keep, generator=generator).div_(keep)


class _AllReduce(torch.autograd.Function):
    """The sum over the replicas, whose gradient is summed as well."""

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
    """The gradient of what every replica received, by what this one gave.

    In a training step the optimizer multiplies by the weight afterwards, so that
    this replica is given (sum over s of w_s * g_s) / w_r. Of that, by the same rule,
    the gradient is the sum of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient, replica: TorchReplica, name: str, weight: float | None
    ):
        ctx.replica, ctx.weight = replica, weight
        if weight is None:
            return replica.sum(name, gradient)
        part = gradient * weight if weight > 0 else torch.zeros_like(gradient)
        total = replica.sum(name, part)
        return total / weight if weight > 0 else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        counts = ctx.weight is None or ctx.weight > 0
        gradient = gradients[0] if counts else torch.zeros_like(gradients[0])
        return _AllReduce.apply(gradient, ctx.replica, ctx.weight), None, None, None


class _AllGather(torch.autograd.Function):
    """The replicas' rows; the gradient of each replica's rows is summed."""

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
            every = torch.tensor(sizes, device=joined.device)
            return joined, workers.gather("all_gather", every, 0)[0].tolist()

        workers = replica._group.workers
        joined, sizes = replica.exchange("all_gather", tensor.detach(), combine)
        ctx.replica, ctx.axis, ctx.sizes, ctx.weight = replica, axis, sizes, weight
        return joined.to(tensor.device, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name = "gradient of all_gather"
        total: Any = _GradientOfSum.apply(gradients[0], ctx.replica, name, ctx.weight)
        mine = total.split(ctx.sizes, dim=ctx.axis)[ctx.replica.id]
        return mine, None, None, None


# One call for all of them.
_clones: Callable[..., Any] = torch._foreach_clone  # pyright: ignore


class InPlaceScope:
    """The variables as this replica sees them, for a `merge_call`.

    Args:
        replica: The replica.
        device: Its device, as torch calls it.
    """

    def __init__(self, replica: "InPlaceReplica", device: str):
        self.device = device
        self._replica = replica

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        if stored(variable) is None:
            return None
        return self._replica.reads(variable).first

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        self._replica.assign(*update)


class InPlaceReplica(WritesInPlace, TorchReplica):
    """See `core.protocol.Replica`.

    Args:
        group: The group that it alone is.

    Attributes:
        before: What was overwritten, by `id`: the tensor, and what it held.
        is_partly_updated: Whether a training step has begun to update the variables, of
            which it keeps no copies.
    """

    scope: Any

    def __init__(self, group: Any):
        super().__init__(group, 0, TurnScheduler(1), ReplicaAttributes({}), RunState())
        self.layout, self.device = group.layout, group.torch_devices[0]
        self.joined = group.joined
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_partly_updated = False

    def make_scope(self, group: Any, index: int, run: RunState) -> InPlaceScope:
        return InPlaceScope(self, group.torch_devices[index])

    def reads(self, variable: Any) -> Components:
        """Notes that the replica reads a variable.

        Args:
            variable: One that has a value.
        """
        components = get_or_create_components(variable, self.layout)
        if variable.aggregation == "sum":
            self.step.sum_variables_read.add(id(variable))
        if self.step.is_applying:
            # Keras's torch optimizers work in place, on what they read.
            self._are_overwritten([components.first])
        return components

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Writes to a variable."""
        tensor = stored(variable)
        if tensor is None:
            raise unbuilt_variable_error(variable)
        own = vars(variable).get(ATTRIBUTE)
        if own is None or own.first is not tensor or own.layout is not self.layout:
            # Which deals a sum out first.
            own = get_or_create_components(variable, self.layout)
        if own.shares is not None:
            value = own.own_part(value, 0)
        if id(tensor) not in self.before:
            self._are_overwritten([tensor])
        with torch.no_grad():
            tensor.copy_(value)

    def sees_replica_variables(self) -> bool:
        return current_stateless_scope() is self._updating

    def tensors_to_update(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if self._updating is not None:
            return super().tensors_to_update(variables)
        tensors = []
        for variable in variables:  # a dozen in a small model: no call for each
            own, tensor = vars(variable).get(ATTRIBUTE), stored(variable)
            if own is None or own.first is not tensor or own.layout is not self.layout:
                get_or_create_components(variable, self.layout)
            tensors.append(tensor)
        self._are_overwritten(tensors)
        return tensors

    def _are_overwritten(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.step.is_applying and self.step.row_weight is not None:
            self.is_partly_updated = True
            return
        fresh = [tensor for tensor in tensors if id(tensor) not in self.before]
        if not fresh:
            return
        copies = _clones([tensor.detach() for tensor in fresh])
        for tensor, copy in zip(fresh, copies, strict=True):
            self.before[id(tensor)] = tensor, copy

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
        variables = self.step.reducing_gradients_of
        # Without a call of a function in a step that shares nothing.
        optimizer, shares = self.step.optimizer, None
        if optimizer is not None and OPTIMIZER_SHARDING in vars(optimizer):
            leave = workers.during_backward.can_overlap(tensors)
            if self.sees_replica_variables() and not leave:
                shares = gradient_shards(optimizer, tensors, variables)
        with torch.no_grad():
            if shares is None:
                return workers.all_reduce_weighted(
                    name, tensors, weight, self.joined, variables
                )
            parts = workers.reduce_scatter_weighted(name, tensors, weight, shares)
            return list(map(shard_only_gradient, tensors, parts))

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Calls a function, all of whose effects are undone if it fails.

        Returns:
            What it returned, as a part of what all replicas do.
        """
        device, batch = self.device, find_batch_rows(args, kwargs)
        if batch is not None and batch.counts is not None:
            self.step.rows = row_ranges(batch.counts)[batch.first]
            self.step.draws, self.step.dry_run = of_layers, rehearse_layer
        workers = self._group.workers
        try:
            workers.during_backward.replica = self
            with (
                contextlib.nullcontext()
                if device == "cpu"
                else torch.cuda.device(device),
                context.replica_scope(self.context),
            ):
                self._own.swap_in()
                own = select_replica((args, kwargs), 0, 1)
                args, kwargs = self._group.arrays_to_tensors(own)
                outputs = self._outputs(fn(*args, **kwargs))
            self._own.keep()
            return outputs
        except BaseException as error:
            self._own.swap_out()
            self._undo()
            if self.is_partly_updated:
                error.add_note(PARTIAL_UPDATE_NOTE)
            raise
        finally:
            workers.during_backward.replica = None
            self.before.clear()  # the replica is part of a cycle

    def _outputs(self, output: Any) -> Any:
        if self.before:
            written = {_memory(tensor) for tensor, _ in self.before.values()}
            output = map_leaves(functools.partial(_apart, written), output)
        return regroup(
            [output],
            torch.is_tensor,
            always_distributed=True,
            join_variables=self._held,
        )

    def _held(self, variables: Any) -> PerReplica:
        """What this replica holds of the variable that it returned."""
        values = [self.scope.get_current_value(variable) for variable in variables]
        values = [v.detach().clone() for v in values if v is not None]
        return PerReplica(together(variables[0], values))

    def _undo(self) -> None:
        with torch.no_grad():
            for tensor, value in self.before.values():
                tensor.copy_(value)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(written: set[int], leaf: Any) -> Any:
    """What was returned, with memory of its own if later runs will write to it."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.clone() if _memory(leaf) in written else leaf
    if isinstance(leaf, np.ndarray) and not leaf.flags.owndata:
        return leaf.copy()  # it may look into a tensor
    return leaf


@of_several
def direct_replica() -> InPlaceReplica | None:
    """The replica that is running and to which reads and writes are to be told."""
    replica = context.distributed_replica()
    if isinstance(replica, InPlaceReplica) and current_thread_replica() is replica:
        return replica
    return None
