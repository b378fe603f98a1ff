"""Slow-operation warnings: each names what the worker waits for."""

import logging

from keras_strategy.workers.watchdog import Operation

logger = logging.getLogger("keras_strategy")

# Time after which an operation counts as slow.
SLOW_OPERATION_SECONDS = 10.0


class SlowOperationWarnings:
    """Logger of slow operations, once for each name.

    Args:
        name: The worker's name in messages.
        timeout_seconds: Time limit of operations without their own.
    """

    def __init__(self, name: str, timeout_seconds: float):
        self._name, self._timeout = name, timeout_seconds
        self._warned: set[str] = set()

    def check(self, operation: Operation, waited: float) -> None:
        """Warn if the operation has taken `waited` seconds and that is slow."""
        if waited < SLOW_OPERATION_SECONDS or operation.name in self._warned:
            return
        # By name, since each step is a new operation.
        self._warned.add(operation.name)
        logger.warning(
            "%s has been in %s for %.0f s, where workers wait for each other. "
            "It gives up after %g s.",
            self._name,
            # Some names already contain code in backticks.
            operation.name if "`" in operation.name else f"`{operation.name}`",
            waited,
            operation.seconds or self._timeout,
        )

    def warn_missing(self, missing: list[str]) -> None:
        """Warn that these workers have not arrived yet."""
        logger.warning(
            "%s has waited for %s to arrive for %.0f s. It gives up after %g s.",
            self._name,
            " and ".join(missing),
            SLOW_OPERATION_SECONDS,
            self._timeout,
        )
