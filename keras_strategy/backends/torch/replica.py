"""One replica: a thread, and what it asks of the others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.hooks import current_stateless_scope
from keras_strategy.backends.threads.replica import ThreadReplica
from keras_strategy.backends.threads.turns import TurnScheduler
from keras_strategy.backends.torch.components import sum_tensors
from keras_strategy.backends.torch.run import RunState
from keras_strategy.backends.torch.staging import StagedWriteScope
from keras_strategy.backends.torch.workers import map_flattened
from keras_strategy.core.own_attributes import ReplicaAttributes
from keras_strategy.rules.reduction import cast_for_sum, check_same_dtype
from keras_strategy.values.distributed import ReduceOp


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
        self, group: Any, index: int, turns: TurnScheduler, own: ReplicaAttributes, run: RunState
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
