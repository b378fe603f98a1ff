"""Each worker's share of a list of files."""

import glob
from collections.abc import Iterable

from keras_strategy.core import context
from keras_strategy.options.input import InputContext


def files(
    pattern: str | Iterable[str], input_context: InputContext | None = None
) -> list[str]:
    """Returns the files that this worker is to read: every N-th of the sorted names.

    Args:
        pattern: What `glob.glob` takes, with `**` for all folders below, or the names.
        input_context: What a dataset function is given. Without one, the share is this
            worker's of the strategy in whose scope this is called.

    Raises:
        ValueError: If there are fewer files than workers: one would have nothing to
            read.

    Example:

    ```python
    import keras_strategy as ks

    context = ks.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    assert ks.files(["c.csv", "a.csv", "b.csv"], context) == ["b.csv"]
    ```
    """
    by_pattern = isinstance(pattern, str)
    names = sorted(glob.glob(pattern, recursive=True) if by_pattern else pattern)
    if input_context is None:
        cluster = context.get_strategy().extended.cluster
        size, rank = (1, 0) if cluster is None else (cluster.size, cluster.rank)
    else:
        size = input_context.num_input_pipelines
        rank = input_context.input_pipeline_id
    if len(names) < size:
        raise ValueError(
            f"Each of the {size} workers must have a file or more to read. Received: "
            f"pattern={pattern!r}, of {len(names)} files"
        )
    return names[rank::size]
