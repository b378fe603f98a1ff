"""Patches of optimizers on torch: a fused Adam step, and sharded updates.

Every replica updates its copy of the variables. Keras's Adam makes about twelve passes
over all of them; torch's fused kernel makes one. Of shards, the other optimizers update
some at a time, as Keras's functions make copies of all that they are given.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import torch
from keras.optimizers import LossScaleOptimizer, Optimizer

from keras_strategy.backends.threads.patches import current_thread_replica
from keras_strategy.backends.torch import state
from keras_strategy.backends.torch.gradient_buckets import (
    MAX_BUCKET_BYTES,
    bucket_by_size,
)
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.sharding import UNIT_BYTES, WeightUnits, unit_of
from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_distributed_scope,
    in_replica,
    multi_replica_only,
)
from keras_strategy.keras_patches.sharded_slots import (
    apply_outside_replicas_error,
    get_or_create_sharding,
)
from keras_strategy.keras_patches.sharded_updates import (
    ShardedUpdateScope,
    current_update_scope,
)
from keras_strategy.training.sharding import OPTIMIZER_SHARDING, FlatShards
from keras_strategy.values import ReduceOp

# The kernel of `torch.optim.Adam(fused=True)`, for all tensors at once.
_adam: Callable[..., Any] = torch._fused_adam_  # pyright: ignore
# The kernel divides by 1 - beta**step, which is 1 for this step.
_NO_CORRECTION = float("inf")


_OPTIMIZERS = "keras.src.backend.torch.optimizers"
Adam: Any = find_module("Adam", f"{_OPTIMIZERS}.torch_adam").Adam
_Parallel: Any = find_module(
    "TorchParallelOptimizer", f"{_OPTIMIZERS}.torch_parallel_optimizer"
).TorchParallelOptimizer


def _fused_update(adam, tensors_of, grads, variables, learning_rate) -> bool:
    """Do Adam's step with torch's kernel, and return False if it does not apply."""
    # The formula is Keras's, from Kingma and Ba, 2014, before their section 2.1:
    # variable -= alpha * momentum / (sqrt(velocity) + epsilon), where alpha is
    # rate * sqrt(1 - beta_2**step) / (1 - beta_1**step). torch's kernel corrects the
    # slots instead and uses epsilon differently, so its correction is disabled, and
    # its learning rate is alpha.
    slot_lists = [adam._momentums, adam._velocities]
    if adam.amsgrad:
        slot_lists.append(adam._velocity_hats)
    indices = [adam._get_variable_index(variable) for variable in variables]
    slots = [slot[index] for slot in slot_lists for index in indices]
    tensors = tensors_of([*variables, *slots])
    every = [*grads, *tensors]
    if (
        not grads[0].is_floating_point()
        or grads[0].layout is not torch.strided
        or len({(t.dtype, t.device, t.layout) for t in every}) > 1
        or not all([t.is_contiguous() for t in every])
    ):
        return False
    # By Keras's operations, which round float64 in some of its versions.
    dtype = variables[0].dtype
    step = keras.ops.cast(keras.ops.convert_to_tensor(adam.iterations) + 1, dtype)
    power_1 = keras.ops.power(keras.ops.cast(adam.beta_1, dtype), step)
    power_2 = keras.ops.power(keras.ops.cast(adam.beta_2, dtype), step)
    alpha = keras.ops.cast(learning_rate, dtype)
    alpha = alpha * torch.sqrt(1 - power_2) / (1 - power_1)
    count = len(grads)
    params, momentums, velocities, *maxima = [
        list(tensors[i : i + count]) for i in range(0, len(tensors), count)
    ]
    _adam(
        params,
        list(grads),
        momentums,
        velocities,
        maxima[0] if maxima else [],
        [torch.full((), _NO_CORRECTION, device=step.device)] * count,
        lr=alpha,
        beta1=adam.beta_1,
        beta2=adam.beta_2,
        weight_decay=0.0,
        eps=adam.epsilon,
        amsgrad=bool(maxima),
        maximize=False,
    )
    return True


def _is_keras_adam() -> bool:
    """Return True if the kernel's results are those of this Keras version."""

    def fused(adam, *args):
        _fused_update(adam, lambda variables: [v.value for v in variables], *args)

    results = []
    for step in (Adam._parallel_update_step, fused):
        variable = keras.Variable([1.0, -2.0, 0.5], dtype="float32", name="trial")
        adam = keras.optimizers.Adam(amsgrad=True, epsilon=0.1, name="trial")
        adam.build([variable])
        for gradient in ([3.0, 1e-3, -2.0], [0.0, -1.0, -2.0]):
            tensor = torch.tensor(gradient, device=variable.value.device)
            with torch.no_grad():
                step(adam, [tensor], [variable], 0.5)
            adam.iterations.assign_add(1)
        results.append(variable.value.detach())
    return torch.allclose(*results, rtol=1e-5)


@hook(
    Adam,
    "_parallel_update_step",
    "(self, grads, variables, learning_rate)",
    when=in_replica,
    needed=_is_keras_adam,
)
def _update(original, replica, self, grads, variables, learning_rate):
    """Update the replica's variables in one pass over memory instead of twelve."""
    if not replica.sees_replica_variables() or not _fused_update(
        self, replica.tensors_to_update, grads, variables, learning_rate
    ):
        original(self, grads, variables, learning_rate)


def updates_in_groups(optimizer: Any) -> bool:
    """Return True if an optimizer updates some shards at a time."""
    # The fused kernel makes no copies, and Nadam assigns a scalar in each call.
    return isinstance(optimizer, _Parallel) and not isinstance(
        optimizer, (Adam, keras.optimizers.Nadam)
    )


@hook(
    _Parallel,
    "_backend_update_step",
    "(self, grads, trainable_variables, learning_rate)",
    when=current_update_scope,
)
def _update_shards(original, scope, self, grads, trainable_variables, learning_rate):
    """Update about 4 MB of shards at a time, so that copies of them are as small."""
    if not updates_in_groups(self):
        return original(self, grads, trainable_variables, learning_rate)
    for group in bucket_by_size(grads, UNIT_BYTES):
        variables = [trainable_variables[index] for index in group]
        original(self, [grads[index] for index in group], variables, learning_rate)


class _TorchShardedUpdateScope(ShardedUpdateScope):
    """The scope of a replica's sharded update."""

    # `indices` are those of the replica's gradients among the `count` of all replicas.

    def __init__(
        self,
        replica: TorchReplica,
        shards: dict[int, torch.Tensor],
        variables: Sequence[Any],
        indices: Sequence[int],
        count: int,
    ):
        super().__init__(replica.scope, shards, variables)
        self._replica, self._indices, self._count = replica, indices, count

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.shards[id(variable)].copy_(value)

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        norms: Any = torch.zeros(self._count, device=self._replica.scope.device)
        if squares:
            norms[list(self._indices)] = torch.stack(list(squares)).to(norms)
        with self.shapes(full=True):
            norms = self._replica.all_reduce(ReduceOp.SUM, norms)
        return [norms[index] for index in self._indices], torch.sum(norms)


class _ShardedUpdate(NamedTuple):
    """A weight of which each replica has updated its shard."""

    tensor: torch.Tensor  # the replica's copy of the weight
    shard: torch.Tensor
    shards: FlatShards


def _gather_updated_weights(
    replica: TorchReplica, updates: Sequence[_ShardedUpdate]
) -> None:
    """Write the other replicas' updated shards to this replica's weights."""
    for bucket in bucket_by_size([u.tensor for u in updates], MAX_BUCKET_BYTES):
        group = [updates[index] for index in bucket]
        sizes = [
            sum([update.shards.size_of(r) for update in group])
            for r in range(len(group[0].shards.bounds))
        ]
        local = torch.cat([update.shard.reshape(-1) for update in group])
        gathered = replica.gather_updates(local, sizes).split(sizes)
        by_replica = [
            flat.split([update.shards.size_of(r) for update in group])
            for r, flat in enumerate(gathered)
        ]
        for update, *shards in zip(group, *by_replica, strict=True):
            update.tensor.copy_(torch.cat(shards).view(update.shards.shape))


@hook(LossScaleOptimizer, "check_finite", "(self, grads)", when=in_replica)
def _check_finite(original, replica, self, grads):
    """Check all shards of the gradients, of which each replica has one."""
    if not any(isinstance(gradient, state.ShardedGradient) for gradient in grads):
        return original(self, grads)
    local = [
        g.shard(replica.id) if isinstance(g, state.ShardedGradient) else g
        for g in grads
        if g is not None
    ]
    not_finite = torch.logical_not(original(self, local)).to(torch.float32)
    return replica.all_reduce(ReduceOp.SUM, not_finite) == 0


@multi_replica_only
def _sharding_to_update(optimizer: Any) -> Any:
    """Return how an optimizer's updates are sharded, if they are."""
    sharding = vars(optimizer).get(OPTIMIZER_SHARDING)
    if sharding is not None or not WeightUnits.exist:
        return sharding
    # It may have no slots.
    strategy = in_distributed_scope()
    if strategy is not None and any(
        unit_of(variable) is not None for variable in optimizer._trainable_variables
    ):
        return get_or_create_sharding(strategy, optimizer)
    return None


@hook(
    Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=_sharding_to_update,
)
def _apply_gradients(original, sharding, self, grads, trainable_variables):
    """Update the replica's shard with Keras's own code, then gather the weights."""
    # The gradients are summed and unscaled before. Constraints are applied afterwards,
    # to full weights.
    replica = current_thread_replica()
    if replica is None or not replica.sees_replica_variables():
        scope = current_stateless_scope()
        given = {} if scope is None else scope.state_mapping
        sharded = [*sharding.slots, *self._trainable_variables]
        if not any(id(variable) in given for variable in sharded):
            raise apply_outside_replicas_error(self)
        return original(self, grads, trainable_variables)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    variables = [*weights, *sharding.slots]
    tensors = replica.tensors_to_update(variables)
    shards, updates = {}, {}
    for variable, tensor in zip(variables, tensors, strict=True):
        shards[id(variable)] = tensor.detach()
    written: list[Any] = []
    for weight in weights:
        tensor, spec = shards[id(weight)], sharding.shards_for(weight, weight.shape)
        if unit_of(weight) is not None:
            written.append(vars(weight)[state.COMPONENTS])
            continue
        shards[id(weight)] = state.shard_of(tensor, spec, replica.id)
        updates[id(weight)] = _ShardedUpdate(tensor, shards[id(weight)], spec)
    indices = sharding.gradient_indices(replica.id, trainable_variables)
    local_weights = [trainable_variables[index] for index in indices]
    local_grads = [
        state.gradient_shard(
            grads[index], sharding.shards_for(weight, weight.shape), replica.id
        )
        for index, weight in zip(indices, local_weights, strict=True)
    ]
    scope = _TorchShardedUpdateScope(replica, shards, variables, indices, len(grads))
    with torch.no_grad():
        with scope, scope.shapes(), replica.updating(scope):
            original(self, local_grads, local_weights)
        changed = weights if self.ema_overwrite_frequency else trainable_variables
        whole = [updates[id(weight)] for weight in changed if id(weight) in updates]
        _gather_updated_weights(replica, whole)
        if written:
            replica.unit_reads.note_writes(written)
