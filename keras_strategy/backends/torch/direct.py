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

from keras_strategy.backends.threads.hooks import keras_scope, replica_here
from keras_strategy.backends.threads.scopes import WritesAtOnce, unbuilt
from keras_strategy.backends.threads.turns import Turns
from keras_strategy.backends.torch.components import (
    ATTRIBUTE,
    Components,
    find_or_make,
    together,
)
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.run import HALF_WRITTEN, Run
from keras_strategy.backends.torch.sharing import (
    with_own_part,
)
from keras_strategy.core import context
from keras_strategy.core.own_attributes import OwnAttributes
from keras_strategy.core.row_range import ranges
from keras_strategy.hooks.draws_of_layers import of_layers, rehearse_layer
from keras_strategy.hooks.hook import of_several
from keras_strategy.hooks.variables import stored
from keras_strategy.rules.batches import batch_of
from keras_strategy.rules.sharding import DIVISION, shares_of_gradients
from keras_strategy.values.distributed import (
    PerReplica,
    map_leaves,
    regroup,
    select_replica,
)

# One call for all of them.
_clones: Callable[..., Any] = torch._foreach_clone  # pyright: ignore


class DirectScope:
    """The variables as this replica sees them, for a `merge_call`.

    Args:
        replica: The replica.
        device: Its device, as torch calls it.
    """

    def __init__(self, replica: "DirectReplica", device: str):
        self.device = device
        self._replica = replica

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        if stored(variable) is None:
            return None
        return self._replica.reads(variable).first

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        self._replica.assign(*update)


class DirectReplica(WritesAtOnce, TorchReplica):
    """See `core.protocol.Replica`.

    Args:
        group: The group that it alone is.

    Attributes:
        before: What was overwritten, by `id`: the tensor, and what it held.
        is_half_written: Whether a training step has begun to update the variables, of
            which it keeps no copies.
    """

    scope: Any

    def __init__(self, group: Any):
        super().__init__(group, 0, Turns(1), OwnAttributes({}), Run())
        self.layout, self.device = group.layout, group.torch_devices[0]
        self.joined = group.joined
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_half_written = False

    def make_scope(self, group: Any, index: int, run: Run) -> DirectScope:
        return DirectScope(self, group.torch_devices[index])

    def reads(self, variable: Any) -> Components:
        """Notes that the replica reads a variable.

        Args:
            variable: One that has a value.
        """
        components = find_or_make(variable, self.layout)
        if variable.aggregation == "sum":
            self.step.read.add(id(variable))
        if self.step.applying:
            # Keras's torch optimizers work in place, on what they read.
            self._are_overwritten([components.first])
        return components

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Writes to a variable."""
        tensor = stored(variable)
        if tensor is None:
            raise unbuilt(variable)
        own = vars(variable).get(ATTRIBUTE)
        if own is None or own.first is not tensor or own.layout is not self.layout:
            # Which deals a sum out first.
            own = find_or_make(variable, self.layout)
        if own.shares is not None:
            value = own.own_part(value, 0)
        if id(tensor) not in self.before:
            self._are_overwritten([tensor])
        with torch.no_grad():
            tensor.copy_(value)

    def sees_variables(self) -> bool:
        return keras_scope() is self._updating

    def to_overwrite(self, variables: Sequence[Any]) -> list[torch.Tensor]:
        if self._updating is not None:
            return super().to_overwrite(variables)
        tensors = []
        for variable in variables:  # a dozen in a small model: no call for each
            own, tensor = vars(variable).get(ATTRIBUTE), stored(variable)
            if own is None or own.first is not tensor or own.layout is not self.layout:
                find_or_make(variable, self.layout)
            tensors.append(tensor)
        self._are_overwritten(tensors)
        return tensors

    def _are_overwritten(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.step.applying and self.step.row_weight is not None:
            self.is_half_written = True
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
        variables = self.step.gradients_of
        # Without a call of a function in a step that shares nothing.
        optimizer, shares = self.step.optimizer, None
        if optimizer is not None and DIVISION in vars(optimizer):
            leave = workers.during_backward.may_leave(tensors)
            if self.sees_variables() and not leave:
                shares = shares_of_gradients(optimizer, tensors, variables)
        with torch.no_grad():
            if shares is None:
                return workers.sum_weighted(
                    name, tensors, weight, self.joined, variables
                )
            parts = workers.share_weighted(name, tensors, weight, shares)
            return list(map(with_own_part, tensors, parts))

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Calls a function, all of whose effects are undone if it fails.

        Returns:
            What it returned, as a part of what all replicas do.
        """
        device, batch = self.device, batch_of(args, kwargs)
        if batch is not None and batch.counts is not None:
            self.step.rows = ranges(batch.counts)[batch.first]
            self.step.draws, self.step.rehearse = of_layers, rehearse_layer
        workers = self._group.workers
        try:
            workers.during_backward.replica = self
            with (
                contextlib.nullcontext()
                if device == "cpu"
                else torch.cuda.device(device),
                context.replica_in_charge(self.context),
            ):
                self._own.put_back()
                own = select_replica((args, kwargs), 0, 1)
                args, kwargs = self._group.tensors_of_arrays(own)
                outputs = self._outputs(fn(*args, **kwargs))
            self._own.keep()
            return outputs
        except BaseException as error:
            self._own.set_aside()
            self._undo()
            if self.is_half_written:
                error.add_note(HALF_WRITTEN)
            raise
        finally:
            workers.during_backward.replica = None
            self.before.clear()  # the replica is part of a cycle

    def _outputs(self, output: Any) -> Any:
        if self.before:
            written = {_memory(tensor) for tensor, _ in self.before.values()}
            output = map_leaves(functools.partial(_apart, written), output)
        return regroup(
            [output], torch.is_tensor, one_of_many=True, of_variables=self._held
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
def direct_replica() -> DirectReplica | None:
    """The replica that is running and to which reads and writes are to be told."""
    replica = context.distributed_replica()
    if isinstance(replica, DirectReplica) and replica_here() is replica:
        return replica
    return None
