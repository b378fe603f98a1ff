"""Variables of optimizers of which each replica keeps a share of the elements.

A replica updates its share of the weights alone, so that it needs no more of what the
optimizer keeps of them. Then the replicas give each other what they have updated.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import torch

from keras_strategy.backends.threads.patches import (
    current_stateless_scope,
    current_thread_replica,
)
from keras_strategy.backends.threads.scopes import MergedScope
from keras_strategy.backends.torch.gradient_buckets import MOST_BYTES, split_by_bytes
from keras_strategy.backends.torch.state import ATTRIBUTE, Components, Layout
from keras_strategy.keras_patches.variables_optimizers import initialize, stored
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.sharding import FlatShards, set_flat_shards

if TYPE_CHECKING:
    from keras_strategy.backends.torch.replica import TorchReplica

# Of a gradient, the replica's share of its sum.
_OWN_PART = "_ks_own_part"


class ShardedComponents(Components):
    """What the replicas of this worker keep of a variable, each its share.

    Args:
        variable: A variable that is initialized, whose tensor is replaced by the share
            of this worker's first replica.
        layout: Where its strategy's replicas are.
        shares: Which elements each of them keeps.
    """

    def __init__(self, variable: Any, layout: Layout, shares: FlatShards):
        whole, self.shares, self.layout = stored(variable).detach(), shares, layout
        self.path, self.on_read = variable.path, False
        # Its reads are looked at in any case.
        self.is_noted = True
        self.tensors = [
            torch.nn.Parameter(
                local_shard(whole, shares, replica).to(device, copy=True),
                requires_grad=False,
            )
            for replica, device in zip(
                layout.topology.local_replicas, layout.devices, strict=True
            )
        ]
        self.first = self.tensors[0]
        self.version = self.first._version
        self._run: object = None
        set_flat_shards(variable, shares)
        initialize(variable, self.first)
        vars(variable)[ATTRIBUTE] = self

    def refresh(self, variable: Any) -> None:
        """No replica holds what another one does."""

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        self.assign_each([value.detach()] * len(self.tensors))

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        parts = [self.own_part(value, index) for index, value in enumerate(values)]
        super().assign_each(parts)

    def own_part(self, value: torch.Tensor, index: int) -> torch.Tensor:
        assert self.shares is not None
        return local_shard(
            value, self.shares, self.layout.topology.local_replicas[index]
        )

    def together(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.shares is not None
        flat = torch.cat([part.detach().reshape(-1).to(self.first) for part in parts])
        if self.layout.workers is not None:
            name = f"the value of '{self.path}'"
            flat, _ = self.layout.workers.gather(name, flat, 0)
        whole = flat.view(self.shares.shape)
        return [whole.to(device) for device in self.layout.devices]


def local_shard(whole: torch.Tensor, shares: FlatShards, replica: int) -> torch.Tensor:
    """What a replica keeps of a tensor; it shares the tensor's memory if it can."""
    begin, end = shares.bounds[replica]
    return whole.reshape(-1)[begin:end].view(shares.shape_of(replica))


def shard_only_gradient(gradient: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A gradient's sum of which only this replica's share is known.

    Args:
        gradient: The gradient.
        part: The share.

    Returns:
        What `gradient_shard` takes. For who reads it all the same it is no number.
    """
    whole = gradient.new_full((), math.nan).expand(gradient.shape)
    setattr(whole, _OWN_PART, part)
    return whole


def gradient_shard(
    gradient: torch.Tensor, shares: FlatShards, replica: int
) -> torch.Tensor:
    """A replica's share of a gradient's sum, see `shard_only_gradient`."""
    part = vars(gradient).get(_OWN_PART)
    return local_shard(gradient, shares, replica) if part is None else part


def full_value(variable: Any, components: Components) -> torch.Tensor | None:
    """The value of a variable that the replicas share, for who reads it.

    Outside of replicas and within, all of them read it, and all workers do.

    Args:
        variable: The variable.
        components: What this worker's replicas keep.

    Returns:
        None where its scope has a value of its own: while the optimizer updates its
        share, and in a scope that a user has given values.
    """
    scope, replica = current_stateless_scope(), current_thread_replica()
    if isinstance(scope, MergedScope):
        return components.together(scope.components(variable))[0]
    if replica is not None:
        assert components.shares is not None
        part = replica.scope.get_current_value(variable).detach().reshape(-1)
        with torch.no_grad():
            return replica.all_gather(part, 0).view(components.shares.shape)
    if scope is not None and scope.get_current_value(variable) is not None:
        return None
    known = overridden_value(variable)
    if known is not None:
        return keras.ops.convert_to_tensor(known)
    return components.together(components.tensors)[0]


class Updated(NamedTuple):
    """A weight of which each replica has updated its share.

    Attributes:
        tensor: What the replica holds of it.
        part: The replica's share, updated.
        shares: Which elements each replica has updated.
    """

    tensor: torch.Tensor
    part: torch.Tensor
    shares: FlatShards


def gather_updated_weights(replica: "TorchReplica", updated: Sequence[Updated]) -> None:
    """Writes to each replica's weights what the others have updated.

    Args:
        replica: The replica.
        updated: The same weights on every replica, in the same order.
    """
    for some in split_by_bytes(updated, lambda one: one.tensor, MOST_BYTES):
        sizes = [
            sum([one.shares.size_of(r) for one in some])
            for r in range(len(some[0].shares.bounds))
        ]
        own = torch.cat([one.part.reshape(-1) for one in some])
        every = replica.gather_shards("optimizer.apply", own, sizes).split(sizes)
        parts = [
            part.split([one.shares.size_of(r) for one in some])
            for r, part in enumerate(every)
        ]
        for one, *of_replicas in zip(some, *parts, strict=True):
            one.tensor.copy_(torch.cat(of_replicas).view(one.shares.shape))
