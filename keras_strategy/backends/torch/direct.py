"""The only replica of a process, which writes to the variables themselves.

Nobody here computes beside it, so what it assigns need not be kept apart, and it runs
as Keras runs on one device. What it overwrites is noted first, and written back if its
function fails.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from keras_strategy.backends.threads.hooks import current_stateless_scope, current_thread_replica
from keras_strategy.backends.threads.scopes import WritesInPlace, unbuilt_variable_error
from keras_strategy.backends.threads.turns import TurnScheduler
from keras_strategy.backends.torch.components import (
    ATTRIBUTE,
    Components,
    get_or_create_components,
    together,
)
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.run import PARTIAL_UPDATE_NOTE, RunState
from keras_strategy.backends.torch.sharing import (
    shard_only_gradient,
)
from keras_strategy.core import context
from keras_strategy.core.own_attributes import ReplicaAttributes
from keras_strategy.core.row_range import row_ranges
from keras_strategy.hooks.draws_of_layers import of_layers, rehearse_layer
from keras_strategy.hooks.hook import of_several
from keras_strategy.hooks.variables import stored
from keras_strategy.rules.batches import find_batch_rows
from keras_strategy.rules.sharding import OPTIMIZER_SHARDING, gradient_shards
from keras_strategy.values.distributed import (
    PerReplica,
    map_leaves,
    regroup,
    select_replica,
)

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
            [output], torch.is_tensor, always_distributed=True, join_variables=self._held
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
