"""Recording of the gradients that a step gives to its optimizers."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AppliedGradients:
    """The arguments of one call of `optimizer.apply`, summed over the replicas."""

    optimizer: Any
    gradients: list[Any]
    variables: list[Any] | None


@dataclass
class StepRecorder:
    """While one is active, optimizers do not apply the gradients that they receive."""

    applied: list[AppliedGradients] = field(default_factory=list)

    def add(self, optimizer: Any, gradients: list[Any], variables: Any) -> None:
        """Record gradients in place of `optimizer.apply`."""
        listed = None if variables is None else list(variables)
        self.applied.append(AppliedGradients(optimizer, gradients, listed))


_thread = threading.local()
_by_strategy: dict[int, StepRecorder] = {}


def active_recorder(strategy: Any = None) -> StepRecorder | None:
    """Return the recorder of a strategy's replicas; without one, of this thread."""
    if strategy is not None:
        return _by_strategy.get(id(strategy))
    return getattr(_thread, "recorder", None)


def is_recording() -> bool:
    """Return True while the replicas of any strategy are recorded."""
    return bool(_by_strategy)


@contextlib.contextmanager
def recording_replicas(strategy: Any, recorder: StepRecorder) -> Iterator[None]:
    """Context manager that records the replicas of a strategy."""
    _by_strategy[id(strategy)] = recorder
    try:
        yield
    finally:
        del _by_strategy[id(strategy)]


@contextlib.contextmanager
def recording_thread(recorder: StepRecorder) -> Iterator[None]:
    """Context manager that records this thread, which is in no strategy."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        del _thread.recorder
