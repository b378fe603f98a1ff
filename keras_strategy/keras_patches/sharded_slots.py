"""Patches of optimizers whose slots are sharded over the replicas, and their plan."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras.optimizers import Optimizer

from keras_strategy.core.protocols import PlannedStep
from keras_strategy.keras_patches.internals import byte_count
from keras_strategy.keras_patches.patch import (
    hook,
    in_distributed_scope,
    multi_replica_only,
)
from keras_strategy.training.sharding import (
    OPTIMIZER_SHARDING,
    FlatShards,
    OptimizerSharding,
    flat_shards_of,
    is_elementwise,
    is_factored,
    is_per_weight,
)

logger = logging.getLogger("keras_strategy")

_SLOT_OF = "_ks_slot_of"
# Slots that Keras creates without a reference to the weight, in the weights' order.
_WITHOUT_REFERENCE = ("_r", "_c")


@hook(
    Optimizer,
    "add_variable_from_reference",
    ("reference_variable",),
    multi_replica_only=True,
)
def _add_from_reference(original, self, reference_variable, *args, **kwargs):
    """Shard a weight's slots as soon as they are created."""
    # Slots created outside of scopes may be adopted later, see `shard_adopted_slot`.
    slots = [original(self, reference_variable, *args, **kwargs)]
    if is_factored(self) and len(reference_variable.shape) > 1:
        lists = [vars(self).get(name) for name in _WITHOUT_REFERENCE]
        slots += [created[-1] for created in lists if created]
    strategy = in_distributed_scope()
    for slot in slots:
        if strategy is None:
            vars(slot)[_SLOT_OF] = self, reference_variable
        else:
            _shard(strategy, self, slot, reference_variable)
    return slots[0]


def shard_adopted_slot(strategy: Any, slot: Any) -> bool:
    """Shard a slot created outside of scopes; return True if it is sharded now."""
    optimizer, weight = vars(slot).pop(_SLOT_OF, (None, None))
    return optimizer is not None and _shard(strategy, optimizer, slot, weight)


def slot_origin(slot: Any) -> tuple[Any, Any]:
    """Return the optimizer and weight of a slot created outside of scopes, or None."""
    return vars(slot).get(_SLOT_OF, (None, None))


def _shard(strategy: Any, optimizer: Any, slot: Any, weight: Any) -> bool:
    if strategy.shard is None or strategy.extended.topology.num_replicas == 1:
        return False
    sharding = get_or_create_sharding(strategy, optimizer)
    if sharding is None or weight.overwrite_with_gradient:
        return False  # each replica updates or overwrites all of the weight
    strategy.extended.group.prepare_slot(weight, sharding)
    strategy.extended.group.share(slot, sharding.shards_for(weight, slot.shape))
    sharding.slots.append(slot)
    return True


def get_or_create_sharding(strategy: Any, optimizer: Any) -> OptimizerSharding | None:
    """Return how an optimizer is sharded; None, with a warning, if it cannot be."""
    sharding = optimizer_sharding_of(optimizer)
    if sharding is not None:
        return sharding
    sharding = new_sharding(optimizer, strategy.extended.topology.num_replicas)
    if sharding is not None:
        vars(optimizer)[OPTIMIZER_SHARDING] = sharding
        return sharding
    if strategy.shard == "parameters":
        raise unshardable_error(optimizer)
    _warn_of_no_sharding(type(optimizer))
    return None


def new_sharding(optimizer: Any, replicas: int) -> OptimizerSharding | None:
    """Return a distribution of an optimizer's slots; None if it cannot be sharded."""
    elementwise = is_elementwise(optimizer)
    if not elementwise and not is_per_weight(optimizer):
        return None
    return OptimizerSharding(replicas, elementwise)


def unshardable_error(optimizer: Any) -> ValueError:
    """Return the error for weights that an optimizer needs whole."""
    return ValueError(
        "shard='parameters' needs one of Keras's optimizers, since the update of a "
        "weight may depend on all of it. Received: the optimizer "
        f"{type(optimizer).__name__}. Use shard='optimizer', or KERAS_BACKEND=jax, "
        "which shards the state of any optimizer."
    )


@functools.cache  # once
def _warn_of_no_sharding(optimizer_class: type) -> None:
    logger.warning(
        "shard='optimizer': the state of the optimizer %s is not sharded. It is not "
        "one of Keras's optimizers, so the update of a weight may depend on other "
        "weights. KERAS_BACKEND=jax shards the state of any optimizer.",
        optimizer_class.__name__,
    )


@multi_replica_only
def optimizer_sharding_of(optimizer: Any) -> OptimizerSharding | None:
    """Return how an optimizer's slots are sharded, if they are."""
    return vars(optimizer).get(OPTIMIZER_SHARDING)


def apply_outside_replicas_error(optimizer: Any) -> RuntimeError:
    """Return the error for gradients that are applied outside of replicas."""
    return RuntimeError(
        f"The state of '{optimizer.name}' is sharded, so each replica must apply "
        "gradients to its shard. Call `optimizer.apply` in a function passed to "
        "`strategy.run`, outside of `merge_call`."
    )


@hook(Optimizer, "_apply_weight_decay", "(self, variables)", when=optimizer_sharding_of)
def _apply_weight_decay(original, sharding, self, variables):
    """Allow a replica without decaying weights, which Keras does not expect."""
    variables = [v for v in variables if self._use_weight_decay(v)]
    if variables:
        original(self, variables)


def sharding_by_weight(step: PlannedStep) -> OptimizerSharding | None:
    """Return one that keeps weights whole; raise ValueError if weights have none."""
    owners = {slot_origin(slot)[0] for slot in step.optimizer.variables} - {None}
    shardings = [new_sharding(o, step.replicas) for o in owners or {step.optimizer}]
    if None in shardings:
        raise unshardable_error(step.optimizer)
    return next((x for x in shardings if x is not None and not x.elementwise), None)


def local_bytes(step: PlannedStep) -> tuple[int, int]:
    """Return the most bytes of weights and of slots on a replica."""
    shardings: dict[Any, Any] = {}

    def shards_of(slot: Any) -> FlatShards | None:
        optimizer, weight = slot_origin(slot)
        if step.shard is None or optimizer is None or weight.overwrite_with_gradient:
            return None
        if optimizer not in shardings:
            shardings[optimizer] = new_sharding(optimizer, step.replicas)
        sharding = shardings[optimizer]
        return None if sharding is None else sharding.shards_for(weight, slot.shape)

    def most(variables: Sequence[Any], shards: Callable[[Any], Any]) -> int:
        local = np.zeros(step.replicas, "int64")
        for variable in variables:
            size: Any = byte_count(variable)
            if (of_variable := shards(variable)) is not None:
                elements = np.diff(of_variable.bounds)[:, 0]
                size = elements * size // max(int(elements.sum()), 1)
            local += size
        return int(local.max())

    return most(step.weights, flat_shards_of), most(step.optimizer.variables, shards_of)
