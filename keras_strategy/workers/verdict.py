"""Who is to blame when the workers do not get on: pure functions of what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class State:
    """What a worker says it is doing.

    Attributes:
        count: How many operations it has entered.
        last: The operation that it entered last.
        inside: The operation that it is in, if any. Others within that may have come
            and gone.
        entered: How many it had entered with that one.
        seconds: For how long.
        where: The line of the program that it is at.
        stack: The innermost frames of its main thread.
        agreements: How many times it has agreed with all others.
        before: How many operations it entered since, before those that it names.
        since: The names of the others.
        notes: What else it says of itself.
    """

    count: int
    last: str
    inside: str | None
    seconds: float
    where: str
    stack: str
    entered: int = 0
    agreements: int = 0
    before: int = 0
    since: list[str] = dataclasses.field(default_factory=list)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def different_operations(names: Sequence[str], operations: Mapping[int, str]) -> str:
    """The error of workers that met in different operations, by rank."""
    told = ", ".join(
        f"{name}: `{operations[rank]}`" if rank in operations else f"{name}: in neither"
        for rank, name in enumerate(names)
    )
    return (
        "All workers must make the same calls in the same order. They are in "
        f"different operations ({told})."
    )


def deadlock(
    names: Sequence[str], states: Mapping[int, State], seconds: float
) -> tuple[str, str] | None:
    """Whether the workers wait for each other and will for ever.

    All of them wait, and since they last agreed on something they have gone different
    ways. A worker that is merely behind has entered what the others have, as far as it
    came: it may be at work there, such as compiling a step.

    Args:
        names: The workers' names, by rank.
        states: What they answered.
        seconds: For how long each must have been waiting.

    Returns:
        The error, and the stacks of all; None where that is not so.
    """
    if len(states) < len(names):
        return None
    if any(not state.inside or state.seconds < seconds for state in states.values()):
        return None
    if len({state.agreements for state in states.values()}) > 1:
        return None
    steps: dict[int, set[str]] = {}
    for state in states.values():
        for number, name in enumerate(state.since, start=state.before):
            # A name in it counts what a process has made, as that of a variable does.
            steps.setdefault(number, set()).add(name.partition(" '")[0])
    if all(len(step) == 1 for step in steps.values()):
        return None
    inside = {rank: str(state.inside) for rank, state in states.items()}
    message = different_operations(names, inside)
    for what in dict.fromkeys(key for s in states.values() for key in s.notes):
        told = [states[rank].notes.get(what) or "none" for rank in range(len(names))]
        if len(set(told)) > 1:
            each = "; ".join(map(": ".join, zip(names, told, strict=True)))
            message += f" Their {what} differ ({each})."
    return message, _stacks(names, states)


def stuck(
    names: Sequence[str], states: Mapping[int, State], timeout_seconds: float
) -> tuple[str, str] | None:
    """Who keeps the others waiting.

    Args:
        names: The workers' names, by rank.
        states: What each of them answered; who is not in it did not.
        timeout_seconds: How long somebody has been waiting.

    Returns:
        The error, and the stacks of those that it blames; None where all have
        come, and it is too early to say that they do not get on.
    """
    front = max(states.values(), key=lambda state: state.count)
    reached = front.inside or front.last
    blamed, stacks = [], []
    for rank, name in enumerate(names):
        state = states.get(rank)
        if state is None:
            blamed.append(
                f"{name} did not reach `{reached}` within {timeout_seconds:g} s "
                "and does not answer: its process is stopped, or one long call keeps "
                "Python busy"
            )
        elif state.count < front.count:
            doing = f"is in `{state.inside}`" if state.inside else "is in no operation"
            further = front.last if state.inside == reached else reached
            blamed.append(
                f"{name} did not reach `{further}` within {timeout_seconds:g} s; it "
                f"{doing}; its main thread is in: {state.where}"
            )
            stacks.append(f"Main thread of {name}:\n{state.stack}")
    if not blamed:
        operations = {r: state.inside or state.last for r, state in states.items()}
        if len(set(operations.values())) > 1:
            blamed.append(different_operations(names, operations))
        # The last one to come may have come just now.
        elif min(s.seconds for s in states.values() if s.inside) < timeout_seconds:
            return None
        else:
            blamed.append(
                f"all workers reached `{reached}`, and it did not end within "
                f"{timeout_seconds:g} s"
            )
        stacks = [_stacks(names, states)]
    return "; ".join(blamed), "\n".join(stacks)


def _stacks(names: Sequence[str], states: Mapping[int, State]) -> str:
    return "\n".join(
        f"Main thread of {names[rank]}:\n{state.stack}"
        for rank, state in sorted(states.items())
    )
