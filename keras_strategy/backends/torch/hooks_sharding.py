"""Where the torch adapter extends Keras for what an optimizer's replicas share."""

from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.hooks import current_stateless_scope, current_thread_replica
from keras_strategy.backends.threads.hooks_divisions import (
    apply_outside_replicas_error,
    optimizer_sharding_of,
)
from keras_strategy.backends.threads.hooks_shares import ShardedUpdateScope
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.sharing import (
    Updated,
    gather_updated_weights,
    gradient_shard,
    local_shard,
)
from keras_strategy.hooks.hook import hook
from keras_strategy.values.distributed import ReduceOp


class _Shared(ShardedUpdateScope):
    """See `ShardedUpdateScope`.

    Args:
        replica: The replica.
        shares: What the replica updates, by the variables' `id`.
        variables: These variables.
        numbers: Of the gradients that it is given, the numbers among those of all
            replicas.
        count: How many gradients these are.
    """

    def __init__(
        self,
        replica: TorchReplica,
        shares: dict[int, torch.Tensor],
        variables: Sequence[Any],
        numbers: Sequence[int],
        count: int,
    ):
        super().__init__(replica.scope, shares, variables)
        self._replica, self._numbers, self._count = replica, numbers, count

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.shares[id(variable)].copy_(value)

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        each: Any = torch.zeros(self._count, device=self._replica.scope.device)
        if squares:
            each[list(self._numbers)] = torch.stack(list(squares)).to(each)
        with self.whole_shapes():
            each = self._replica.all_reduce(ReduceOp.SUM, each)
        return [each[number] for number in self._numbers], torch.sum(each)


@hook(
    keras.optimizers.Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=optimizer_sharding_of,
)
def _apply_gradients(original, division, self, grads, trainable_variables):
    """Each replica updates its share, by Keras's own code.

    Before it the gradients were summed, and their loss unscaled. After it the weights
    are whole again, so that constraints are of whole weights.
    """
    replica = current_thread_replica()
    if replica is None or not replica.sees_replica_variables():
        scope = current_stateless_scope()
        if scope is None or id(division.slots[0]) not in scope.state_mapping:
            raise apply_outside_replicas_error(self)
        return original(self, grads, trainable_variables)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    variables = [*weights, *division.slots]
    tensors = replica.tensors_to_update(variables)
    parts, updated = {}, {}
    for variable, tensor in zip(variables, tensors, strict=True):
        parts[id(variable)] = tensor.detach()
    for weight in weights:
        tensor, shares = parts[id(weight)], division.shards_for(weight, weight.shape)
        parts[id(weight)] = local_shard(tensor, shares, replica.id)
        updated[id(weight)] = Updated(tensor, parts[id(weight)], shares)
    numbers = division.gradient_indices(replica.id, trainable_variables)
    of_own = [trainable_variables[number] for number in numbers]
    own = [
        gradient_shard(grads[number], updated[id(weight)].shares, replica.id)
        for number, weight in zip(numbers, of_own, strict=True)
    ]
    scope = _Shared(replica, parts, variables, numbers, len(grads))
    with torch.no_grad():
        with scope, scope.shapes(), replica.updating(scope):
            original(self, own, of_own)
        changed = weights if self.ema_overwrite_frequency else trainable_variables
        gather_updated_weights(replica, [updated[id(weight)] for weight in changed])
