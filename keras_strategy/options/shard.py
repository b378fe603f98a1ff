"""Option `shard`."""

from typing import Any

from keras_strategy.errors import UnsupportedBackendError

SHARDS = (None, "optimizer", "parameters")


def check_shard(shard: Any, engine: Any) -> str | None:
    """Return the argument if a strategy can use it on this backend.

    Raises:
        ValueError: If it is invalid.
        UnsupportedBackendError: If the backend does not support it.
    """
    if shard is not None and not (isinstance(shard, str) and shard in SHARDS):
        raise ValueError(
            "Argument `shard` must be 'optimizer', to shard the optimizer's slots over "
            "the replicas, 'parameters', to shard the trainable weights as well, or "
            f"None, for a copy on each replica. Received: shard={shard!r}"
        )
    reason = None if shard is None else engine.sharding_unsupported_reason(shard)
    if reason is not None:
        raise UnsupportedBackendError(
            f"shard={shard!r} is not available with the Keras backend '{engine.name}': "
            f"{reason}"
        )
    return shard
