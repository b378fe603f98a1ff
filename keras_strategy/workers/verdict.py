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
        inside: The operation that it is in, if any.
        seconds: For how long.
        where: The line of the program that it is at.
        stack: The innermost frames of its main thread.
    """

    count: int
    last: str
    inside: str | None
    seconds: float
    where: str
    stack: str


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
    blamed, stacks = [], []
    for rank, name in enumerate(names):
        state = states.get(rank)
        if state is None:
            blamed.append(
                f"{name} did not reach `{front.last}` within {timeout_seconds:g} s "
                "and does not answer: its process is stopped, or one long call keeps "
                "Python busy"
            )
        elif state.count < front.count:
            doing = f"is in `{state.inside}`" if state.inside else "is in no operation"
            blamed.append(
                f"{name} did not reach `{front.last}` within {timeout_seconds:g} s; it "
                f"{doing}; its main thread is in: {state.where}"
            )
            stacks.append(f"Main thread of {name}:\n{state.stack}")
    if not blamed:
        operations = {rank: state.last for rank, state in states.items()}
        if len(set(operations.values())) > 1:
            blamed.append(different_operations(names, operations))
        # The last one to come may have come just now.
        elif min(s.seconds for s in states.values() if s.inside) < timeout_seconds:
            return None
        else:
            blamed.append(
                f"all workers reached `{front.last}`, and it did not end within "
                f"{timeout_seconds:g} s"
            )
        stacks = [f"Main thread of {names[r]}:\n{s.stack}" for r, s in states.items()]
    return "; ".join(blamed), "\n".join(stacks)
