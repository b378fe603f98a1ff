"""What is to be done when a machine is about to be taken away."""

from collections.abc import Callable
from typing import Any


class TerminationConfig:
    """How workers learn that they are to end, how long they have, and how they end.

    Args:
        termination_watcher_fn: Whether this worker is to end; it is called once a
            second, in a thread of its own, and must return at once. None takes
            SIGTERM as the notice.
        exit_fn: Ends the process when all is saved. None ends it with the exit code 75,
            of which `keras-strategy run --max-restarts` starts it again.
        grace_period: How many seconds there are from the notice to the end. They are
            used: what there is is saved at once, and once more shortly before the end.
            None, or 0, saves once and ends.
        save_fn: Saves, in the place of what would be done otherwise; it is called on
            all workers, with the arguments of `save_checkpoint_if_preempted`.

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
