"""Optimizer variables of which each replica stores a shard.

A replica updates its shard of the weights only, so it needs no more of the optimizer's
state. Then the replicas gather what they have updated.
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
from keras_strategy.backends.torch.gradient_buckets import (
    MAX_BUCKET_BYTES,
    split_by_bytes,
)
from keras_strategy.backends.torch.state import COMPONENTS, Components, Layout
from keras_strategy.keras_patches.variables_optimizers import initialize, stored_value
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.sharding import FlatShards, set_flat_shards

if TYPE_CHECKING:
    from keras_strategy.backends.torch.replica import TorchReplica

_LOCAL_SHARD = "_ks_local_shard"


class ShardedComponents(Components):
    """The shards of a variable that this worker's replicas store.

    Args:
        variable: An initialized variable, whose tensor is replaced by the shard of this
            worker's first replica.
        layout: The placement of the replicas.
        shards: The elements that each of them stores.
    """

    def __init__(self, variable: Any, layout: Layout, shards: FlatShards):
        full, self.shards, self.layout = stored_value(variable).detach(), shards, layout
        self.path, self.on_read = variable.path, False
        self.is_tracked = True  # reads need the full value
        self.tensors = [
            torch.nn.Parameter(
                shard_of(full, shards, replica).to(device, copy=True),
                requires_grad=False,
            )
            for replica, device in zip(
                layout.topology.local_replicas, layout.devices, strict=True
            )
        ]
        self.first = self.tensors[0]
        self.version = self.first._version
        self._run: object = None
        set_flat_shards(variable, shards)
        initialize(variable, self.first)
        vars(variable)[COMPONENTS] = self

    def refresh(self, variable: Any) -> None:
        """Do nothing: no replica stores what another one does."""

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        self.assign_each([value.detach()] * len(self.tensors))

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        super().assign_each([self.local_shard(v, i) for i, v in enumerate(values)])

    def local_shard(self, value: torch.Tensor, index: int) -> torch.Tensor:
        assert self.shards is not None
        return shard_of(value, self.shards, self.layout.topology.local_replicas[index])

    def full_values(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self.shards is not None
        flat = torch.cat([part.detach().reshape(-1).to(self.first) for part in parts])
        if self.layout.workers is not None:
            name = f"the value of '{self.path}'"
            flat, _ = self.layout.workers.gather(name, flat, 0)
        full = flat.view(self.shards.shape)
        return [full.to(device) for device in self.layout.devices]


def shard_of(full: torch.Tensor, shards: FlatShards, replica: int) -> torch.Tensor:
    """Return a replica's shard of a tensor, as a view if possible."""
    begin, end = shards.bounds[replica]
    return full.reshape(-1)[begin:end].view(shards.shape_of(replica))


def shard_only_gradient(gradient: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for a gradient's sum of which only the local shard is known.

    Its elements are NaN, for code that reads it without `gradient_shard`.
    """
    full = gradient.new_full((), math.nan).expand(gradient.shape)
    setattr(full, _LOCAL_SHARD, shard)
    return full


def gradient_shard(
    gradient: torch.Tensor, shards: FlatShards, replica: int
) -> torch.Tensor:
    """Return a replica's shard of a gradient's sum, see `shard_only_gradient`."""
    shard = vars(gradient).get(_LOCAL_SHARD)
    return shard_of(gradient, shards, replica) if shard is None else shard


def full_value(variable: Any, components: Components) -> torch.Tensor | None:
    """Return a sharded variable's full value; all replicas and workers call this.

    Returns:
        None if the current scope has a value of its own: while the optimizer updates
        its shard, and in a scope with the user's values.
    """
    scope, replica = current_stateless_scope(), current_thread_replica()
    if isinstance(scope, MergedScope):
        return components.full_values(scope.components(variable))[0]
    if replica is not None:
        assert components.shards is not None
        shard = replica.scope.get_current_value(variable).detach().reshape(-1)
        with torch.no_grad():
            return replica.all_gather(shard, 0).view(components.shards.shape)
    if scope is not None and scope.get_current_value(variable) is not None:
        return None
    override = overridden_value(variable)
    if override is not None:
        return keras.ops.convert_to_tensor(override)
    return components.full_values(components.tensors)[0]


class ShardedUpdate(NamedTuple):
    """A weight of which each replica has updated its shard.

    Attributes:
        tensor: The replica's copy of the weight.
        shard: The replica's shard, updated.
        shards: The elements that each replica has updated.
    """

    tensor: torch.Tensor
    shard: torch.Tensor
    shards: FlatShards


def gather_updated_weights(
    replica: "TorchReplica", updates: Sequence[ShardedUpdate]
) -> None:
    """Write the other replicas' updated shards to this replica's weights.

    The weights and their order are the same on every replica.
    """
    for group in split_by_bytes(updates, lambda u: u.tensor, MAX_BUCKET_BYTES):
        sizes = [
            sum([update.shards.size_of(r) for update in group])
            for r in range(len(group[0].shards.bounds))
        ]
        local = torch.cat([update.shard.reshape(-1) for update in group])
        gathered = replica.gather_shards("optimizer.apply", local, sizes).split(sizes)
        by_replica = [
            flat.split([update.shards.size_of(r) for update in group])
            for r, flat in enumerate(gathered)
        ]
        for update, *shards in zip(group, *by_replica, strict=True):
            update.tensor.copy_(torch.cat(shards).view(update.shards.shape))
