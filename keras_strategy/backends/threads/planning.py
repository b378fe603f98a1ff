"""Planning where each replica stores ranges of flattened slots."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_strategy.backends.threads.patches_sharding import new_sharding, slot_origin
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.variables_optimizers import byte_count


def plan_slots(
    slots: Sequence[Any], replicas: int, shard: str | None
) -> tuple[int, bool]:
    """Return the most bytes that a replica has of slots, and if these are sharded."""
    local, shardings = np.zeros(replicas, "int64"), {}
    for slot in slots:
        optimizer, weight = slot_origin(slot)
        if optimizer is not None and optimizer not in shardings:
            shardings[optimizer] = shard and new_sharding(optimizer, replicas)
        sharding = shardings.get(optimizer)
        if not sharding or weight.overwrite_with_gradient:
            local += byte_count(slot)
        else:
            shards = np.diff(sharding.shards_for(weight, slot.shape).bounds)[:, 0]
            local += shards * byte_count(slot) // max(int(shards.sum()), 1)
    return int(local.max()), any(shardings.values())


def can_scatter(optimizer: Any) -> bool:
    """Return True if processes send each other shards of the gradients alone."""
    return (
        not get_engine().list_devices("gpu")
        and optimizer.loss_scale_factor is None
        and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    )
