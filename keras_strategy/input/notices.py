"""What workers are told, once, of how they read their data."""

import logging
from collections.abc import Sequence

from keras_strategy.workers.cluster import Cluster

logger = logging.getLogger("keras_strategy")

_SAME_ROWS = (
    "All workers read the same rows; with %d workers that trains each row %d times. "
    "Have each read a part of its own: `keras_strategy.InputContext` tells a dataset "
    "function which (`input_pipeline_id`), and `keras_strategy.files` shares files. Or "
    "distribute the dataset with `AutoShardPolicy.DATA`, where all read global batches."
)
_OTHER_ROWS = (
    "The data of the %d workers differs: a row that all of them have read is another "
    "one on some, and holds random numbers. Each reads 1/%d of the rows of its own "
    "data, as if all had the same. To compute what one device does, draw for row i "
    "from a generator of its own, such as `np.random.default_rng([seed, i])`."
)
_READ_BY_ALL = (
    "Each of the %d workers reads all rows of this data and computes on its own: it is "
    "read %d times. Where reading is slow, give rows that can be indexed "
    "(`keras_strategy.IndexedDataset`, or a torch DataLoader of them), of which a "
    "worker reads its own alone, or have each worker read a part of its own, with "
    "`AutoShardPolicy.OFF`, or FILE for a `tf.data.Dataset` of files."
)


def warn_if_same_rows(cluster: Cluster, digests: Sequence[str]) -> None:
    """Warns of workers that should read rows of their own, and read the same.

    Args:
        cluster: The workers.
        digests: Of each worker's first batch; empty where there is none.
    """
    if cluster.size > 1 and len(set(digests)) == 1 and digests[0].strip("-"):
        _say(cluster, _SAME_ROWS)


def warn_if_rows_differ(cluster: Cluster) -> None:
    """Warns of workers that read rows of a common source, which is not the same."""
    _say(cluster, _OTHER_ROWS)


def warn_full_reads(cluster: Cluster) -> None:
    """Says what it costs that each worker reads whole batches."""
    if cluster.size > 1:
        _say(cluster, _READ_BY_ALL)


def _say(cluster: Cluster, message: str) -> None:
    if cluster.is_chief and message not in _said:
        _said.add(message)
        logger.warning(message, cluster.size, cluster.size)


_said: set[str] = set()
