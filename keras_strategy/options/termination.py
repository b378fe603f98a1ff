"""Options for preemption."""

from collections.abc import Callable
from typing import Any


class TerminationConfig:
    """Detection of preemption, and the reaction to it.

    Args:
        termination_watcher_fn: Returns True if this worker is to end. Called once a
            second in a thread; must return at once. None takes SIGTERM as the notice.
        exit_fn: Ends the process after saving. None exits with code 75, with which
            `keras-strategy run --max-restarts` restarts it.
        grace_period: Seconds between the notice and the end. State is saved at once,
            and again shortly before the end. None, or 0, saves once and ends.
        save_fn: Saves instead of the default. Called on all workers, with the
            arguments of `save_checkpoint_if_preempted`.

    Example:

    ```python
    import pathlib

    import keras_strategy as ks

    notice = pathlib.Path("/run/this-machine-is-about-to-end")
    config = ks.experimental.TerminationConfig(
        termination_watcher_fn=notice.exists, grace_period=120
    )
    ```
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], bool] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ):
        for name, value in (
            ("termination_watcher_fn", termination_watcher_fn),
            ("exit_fn", exit_fn),
            ("save_fn", save_fn),
        ):
            if value is not None and not callable(value):
                raise ValueError(
                    f"Argument `{name}` must be a function or None. Received: "
                    f"{name}={value!r}"
                )
        number = isinstance(grace_period, int | float)
        if grace_period is not None and not (number and grace_period >= 0):
            raise ValueError(
                "Argument `grace_period` must be a number of seconds, 0 or more, or "
                f"None. Received: grace_period={grace_period!r}"
            )
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = grace_period
        self.save_fn = save_fn
