"""What is split over the replicas, where each need not hold a copy."""

from typing import Any

from keras_strategy.errors import UnsupportedBackendError

SHARDS = (None, "optimizer", "parameters")


def check_shard(shard: Any, engine: Any) -> str | None:
    """Returns the argument if it is one that a strategy takes, on this backend.

    Args:
        shard: The argument.
        engine: The engine in use.

    Raises:
        ValueError: If no strategy takes it.
        UnsupportedBackendError: If the engine does not do it.
    """
    if shard is not None and not (isinstance(shard, str) and shard in SHARDS):
        raise ValueError(
            "Argument `shard` must be 'optimizer', to split what the optimizer keeps "
            "over the replicas, 'parameters', to split the trained weights as well, or "
            f"None, for a copy on each of them. Received: shard={shard!r}"
        )
    refusal = None if shard is None else engine.refusal_of_shard(shard)
    if refusal is not None:
        raise UnsupportedBackendError(
            f"shard={shard!r} is not there with the Keras backend '{engine.name}': "
            f"{refusal}"
        )
    return shard
