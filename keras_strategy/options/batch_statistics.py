"""Option `batch_statistics`."""

from typing import Any

GLOBAL = "global"


def check_batch_statistics(batch_statistics: Any) -> str | None:
    """Return the argument, or raise ValueError."""
    if batch_statistics is None or (
        isinstance(batch_statistics, str) and batch_statistics == GLOBAL
    ):
        return batch_statistics
    raise ValueError(
        "Argument `batch_statistics` must be 'global', for the statistics of the "
        "global batch, or None, for those that the backend computes without "
        "communication. Received: "
        f"batch_statistics={batch_statistics!r}"
    )
