"""Operation traces of the workers, and the diagnosis of failures from their reports."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType

from keras_strategy.cluster.watchdog import Operation

_MAX_FRAMES = 6
# Operations since the last exchange that a report names.
_MAX_NAMES = 64


class OperationTrace:
    """Operations of a worker: written by its main thread, read by its watchdog.

    Attributes:
        count: Number of operations entered.
        last: Name of the operation entered last.
        operation: The current operation.
        exchanges: Number of completed exchanges with all workers.
        notes: What a report of a deadlock compares between workers, by topic.
    """

    __slots__ = (
        *("_count_at_exchange", "_names", "_thread_id", "count", "exchanges", "last"),
        *("notes", "operation"),
    )

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.count = 0
        self.last = ""
        self.operation: Operation | None = None
        self.exchanges = 0
        self._count_at_exchange = 0
        self._names = [""] * _MAX_NAMES
        self.notes: dict[str, str] = {}

    def enter(self, name: str, seconds: float | None = None) -> Operation | None:
        """Enter an operation, with its own time limit if any; return the outer one."""
        outer = self.operation
        self.count = count = self.count + 1
        self.last = name
        self._names[count % _MAX_NAMES] = name
        self.operation = Operation(count, name, time.monotonic(), seconds)
        return outer

    def record_exchange(self) -> None:
        """Record that all workers are at the same place in the program."""
        self.exchanges += 1
        self._count_at_exchange = self.count

    def since_exchange(self) -> tuple[int, list[str]]:
        """Return the last operations since the exchange, and how many preceded them."""
        first = max(self._count_at_exchange, self.count - _MAX_NAMES)
        names = [self._names[n % _MAX_NAMES] for n in range(first + 1, self.count + 1)]
        return first - self._count_at_exchange, names

    def stack(self) -> tuple[str, str]:
        """Return the current line of the thread, and its innermost frames."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "a thread that has ended", ""
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_MAX_FRAMES, lookup_lines=True
        )
        frames.reverse()
        last = frames[-1]
        where = f"{last.name} ({last.filename}, line {last.lineno}"
        where += f": {last.line})" if last.line else ")"
        return where, "".join(frames.format())


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """A worker's report of what it is doing.

    Attributes:
        count: Number of operations entered.
        last: Name of the operation entered last.
        inside: Name of the current operation. Nested ones may have ended since.
        seconds: Time in the current operation.
        where: Current line of the program.
        stack: Innermost frames of the main thread.
        entered: Number of operations entered up to and including the current one.
        exchanges: Number of completed exchanges with all workers.
        before: Number of operations since the last exchange that `since` omits.
        since: Names of the operations since the last exchange.
        notes: What else is compared between workers, by topic.
    """

    count: int
    last: str
    inside: str | None
    seconds: float
    where: str
    stack: str
    entered: int = 0
    exchanges: int = 0
    before: int = 0
    since: list[str] = dataclasses.field(default_factory=list)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def mismatch_message(names: Sequence[str], operations: Mapping[int, str]) -> str:
    """Return the error for workers that are in different operations, by rank."""
    by_worker = ", ".join(
        f"{name}: `{operations[rank]}`" if rank in operations else f"{name}: in neither"
        for rank, name in enumerate(names)
    )
    return (
        "All workers must make the same calls in the same order. They are in "
        f"different operations ({by_worker})."
    )


def diagnose_deadlock(
    names: Sequence[str], states: Mapping[int, WorkerState], seconds: float
) -> tuple[str, str] | None:
    """Return the error and all stacks if the workers wait for each other forever.

    In a deadlock every worker has waited for at least `seconds`, and since their last
    exchange their operations differ. A worker that is merely behind has entered the
    same operations as the others so far: it may be at work, such as compiling a step.
    """
    if len(states) < len(names):
        return None
    if any(not state.inside or state.seconds < seconds for state in states.values()):
        return None
    if len({state.exchanges for state in states.values()}) > 1:
        return None
    steps: dict[int, set[str]] = {}
    for state in states.values():
        for number, name in enumerate(state.since, start=state.before):
            # A quoted name inside it, such as a variable's, may count objects made by
            # one process.
            steps.setdefault(number, set()).add(name.partition(" '")[0])
    if all(len(step) == 1 for step in steps.values()):
        return None
    inside = {rank: str(state.inside) for rank, state in states.items()}
    message = mismatch_message(names, inside)
    for topic in dict.fromkeys(key for s in states.values() for key in s.notes):
        notes = [states[rank].notes.get(topic) or "none" for rank in range(len(names))]
        if len(set(notes)) > 1:
            by_worker = "; ".join(map(": ".join, zip(names, notes, strict=True)))
            message += f" Their {topic} differ ({by_worker})."
    return message, _format_stacks(names, states)


def diagnose_timeout(
    names: Sequence[str], states: Mapping[int, WorkerState], timeout_seconds: float
) -> tuple[str, str] | None:
    """Return which workers hold up the others, as an error and their stacks.

    `states` has the workers that answered. Return None if all workers have arrived, the
    last one less than `timeout_seconds` ago.
    """
    front = max(states.values(), key=lambda state: state.count)
    reached = front.inside or front.last
    causes, stacks = [], []
    for rank, name in enumerate(names):
        state = states.get(rank)
        if state is None:
            causes.append(
                f"{name} did not reach `{reached}` within {timeout_seconds:g} s "
                "and does not answer: its process is stopped, or one long call keeps "
                "Python busy"
            )
        elif state.count < front.count:
            doing = f"is in `{state.inside}`" if state.inside else "is in no operation"
            further = front.last if state.inside == reached else reached
            causes.append(
                f"{name} did not reach `{further}` within {timeout_seconds:g} s; it "
                f"{doing}; its main thread is in: {state.where}"
            )
            stacks.append(f"Main thread of {name}:\n{state.stack}")
    if not causes:
        operations = {r: state.inside or state.last for r, state in states.items()}
        if len(set(operations.values())) > 1:
            causes.append(mismatch_message(names, operations))
        elif min(s.seconds for s in states.values() if s.inside) < timeout_seconds:
            return None
        else:
            causes.append(
                f"all workers reached `{reached}`, and it did not end within "
                f"{timeout_seconds:g} s"
            )
        stacks = [_format_stacks(names, states)]
    return "; ".join(causes), "\n".join(stacks)


def _format_stacks(names: Sequence[str], states: Mapping[int, WorkerState]) -> str:
    return "\n".join(
        f"Main thread of {names[rank]}:\n{state.stack}"
        for rank, state in sorted(states.items())
    )
