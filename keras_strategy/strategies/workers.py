"""How the workers of a strategy meet, and what must be the same on all of them."""

import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategy.core.registry import get_engine
from keras_strategy.input import seeds
from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.strategies.base import Strategy
from keras_strategy.workers.cluster import Cluster
from keras_strategy.workers.joining import join_cluster


def connect_workers(resolver: Any, options: CommunicationOptions) -> Cluster | None:
    """Meets the other workers, and has the engines find each other; once.

    Args:
        resolver: See `join`.
        options: See `join`.

    Returns:
        The workers; None where this process trains alone.
    """
    workers = join_cluster(resolver, options)
    if workers is not None:
        get_engine().connect(workers)
    return workers


def check_workers_agree(
    strategy: Strategy,
    workers: Cluster,
    devices: Sequence[str],
    chosen: dict[str, Any] | None = None,
) -> None:
    """Makes sure that the workers have what must be the same, and takes the seeds.

    Args:
        strategy: The strategy, which knows its arguments by now.
        workers: The workers.
        devices: This worker's devices.
        chosen: What else was chosen, of JSON's values, by what messages call it.

    Raises:
        RuntimeError: If something is not the same on all workers.
    """
    own = {
        "Keras backend": keras.backend.backend(),
        "Keras version": keras.__version__,
        f"{keras.backend.backend()} version": _version(keras.backend.backend()),
        "keras_strategy version": _version("keras_strategy"),
        "number of local devices": len(devices),
        "kind of device": devices[0].split(":")[0],
        "`batch_statistics`": strategy.batch_statistics,
        "`shard`": strategy.shard,
        **(chosen or {}),
        "`bytes_per_pack`": workers.options.bytes_per_pack,
    }
    all_of_them = workers.exchange(f"{type(strategy).__name__}()", own)
    for what, value in own.items():
        told = [other.get(what) for other in all_of_them]
        if any(other != value for other in told):
            raise RuntimeError(
                f"All workers must have the same {what}. Received: "
                f"{workers.format_by_worker(told)}."
            )
    seeds.sync_with_chief(workers)


def _version(package: str) -> str:
    return str(getattr(sys.modules[package], "__version__", None))
