"""Time of training steps on simulated machines, which need Linux and root."""

from collections.abc import Callable, Mapping
from typing import Any

from keras_strategy.testing import WorkerRunner
from keras_strategy.testing.warm_starter import WarmStarter
from tests.distributed.machines import simulated_machines


def run_on_machines(
    starter: WarmStarter,
    count: int,
    link: Mapping[str, float],
    function: Callable[..., Any],
    *arguments: Any,
) -> list[Any]:
    """Call a function with the machines in a worker of each; return the results."""
    with (
        simulated_machines(count, **link) as machines,
        WorkerRunner(count, timeout_seconds=500, starter=starter) as runner,
    ):
        return runner.run(function, *arguments, machines)
