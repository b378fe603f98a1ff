"""Patches of optimizers whose slots are sharded over the replicas."""

import logging
from typing import Any

import keras

from keras_strategy.keras_patches.patch import (
    hook,
    in_distributed_scope,
    of_several,
)
from keras_strategy.training.sharding import (
    OPTIMIZER_SHARDING,
    OptimizerSharding,
    is_elementwise,
    is_factored,
    is_per_weight,
)

logger = logging.getLogger("keras_strategy")

_SLOT_OF = "_ks_slot_of"


# These Keras makes without saying of which weight: lists in the weights' order.
_WITHOUT_REFERENCE = ("_r", "_c")
_told: set[type] = set()


@hook(
    keras.optimizers.Optimizer,
    "add_variable_from_reference",
    ("reference_variable",),
    several=True,
)
def _add_from_reference(original, self, reference_variable, *args, **kwargs):
    """What an optimizer keeps of a weight is shared when it is made, one at a time.

    What is made outside of scopes may come into one later: see `shard_adopted_slot`.
    """
    made = [original(self, reference_variable, *args, **kwargs)]
    if is_factored(self) and len(reference_variable.shape) > 1:
        lists = [vars(self).get(name) for name in _WITHOUT_REFERENCE]
        made += [of_weights[-1] for of_weights in lists if of_weights]
    strategy = in_distributed_scope()
    for slot in made:
        if strategy is None:
            vars(slot)[_SLOT_OF] = self, reference_variable
        else:
            _share(strategy, self, slot, reference_variable)
    return made[0]


def shard_adopted_slot(strategy: Any, slot: Any) -> bool:
    """Shares what an optimizer made outside of scopes, if that is known of a variable.

    Args:
        strategy: The strategy that it comes to.
        slot: The variable.

    Returns:
        Whether the replicas share it now.
    """
    optimizer, weight = vars(slot).pop(_SLOT_OF, (None, None))
    return optimizer is not None and _share(strategy, optimizer, slot, weight)


def _share(strategy: Any, optimizer: Any, slot: Any, weight: Any) -> bool:
    """Leaves each replica its share of a variable, if the strategy wants it to."""
    if strategy.shard is None or strategy.num_replicas_in_sync == 1:
        return False
    kind = type(optimizer)
    if not is_elementwise(optimizer) and not is_per_weight(optimizer):
        if kind not in _told:
            _told.add(kind)
            logger.warning(
                "shard='optimizer': what the optimizer %s keeps stays whole on each "
                "replica, since it is none of Keras's own, whose rules are known: it "
                "may compute a weight's update of other weights. KERAS_BACKEND=jax "
                "splits what any optimizer keeps.",
                kind.__name__,
            )
        return False
    if weight.overwrite_with_gradient:  # by each replica, with the whole of it
        return False
    division = vars(optimizer).get(OPTIMIZER_SHARDING)
    if division is None:
        division = OptimizerSharding(
            strategy.num_replicas_in_sync, is_elementwise(optimizer)
        )
        vars(optimizer)[OPTIMIZER_SHARDING] = division
    strategy.extended.group.share(slot, division.shards_for(weight, slot.shape))
    division.slots.append(slot)
    return True


@of_several
def optimizer_sharding_of(optimizer: Any) -> OptimizerSharding | None:
    """How the replicas share what an optimizer keeps, if they do."""
    return vars(optimizer).get(OPTIMIZER_SHARDING)


def apply_outside_replicas_error(optimizer: Any) -> RuntimeError:
    """What is raised where gradients are applied and no replica is there to do it."""
    return RuntimeError(
        f"The replicas share what '{optimizer.name}' keeps, so that all of them "
        "apply gradients, each to its share. Call `optimizer.apply` in a "
        "function that `strategy.run` is given, outside of `merge_call`."
    )


@hook(
    keras.optimizers.Optimizer,
    "_apply_weight_decay",
    "(self, variables)",
    when=optimizer_sharding_of,
)
def _apply_weight_decay(original, division, self, variables):
    """A replica may have no weight that decays, which Keras does not expect."""
    variables = [v for v in variables if self._use_weight_decay(v)]
    if variables:
        original(self, variables)
