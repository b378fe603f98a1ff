"""One row: a comparison of one case, and what is known of the machine meanwhile."""

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.paired_timing import CPU, OtherLoad, Pairing, compare, warm
from benchmarks.sides import Sided
from tests.testing.warm_starter import WarmStarter

# A row is noisy where others took more than this share of the machine, or the quartiles
# of its ratio in CPU time are farther apart.
OTHERS = 0.03
WIDTH = 0.08


@dataclasses.dataclass(frozen=True)
class _Start:
    """Measurements between the start of all processes and their end.

    Attributes:
        steps: How many a long turn had.
        pairing: What the rounds gave.
        seconds: Of processors: what both sides used, and that out of their turns.
        others: The share of the machine that others used.
        first_steps: Seconds until the first step was done, ours and the peer's.
        peaks: Their megabytes at most.
    """

    steps: int
    pairing: Pairing
    seconds: tuple[float, float]
    others: float
    first_steps: tuple[float, float]
    peaks: tuple[float, float]


def row_of(
    starter: WarmStarter,
    comparison: Comparison,
    case: str,
    rounds: int,
    seconds: float,
    starts: int = 1,
) -> dict[str, Any]:
    """Measures a row.

    Args:
        starter: What starts the processes.
        comparison: The programs.
        case: The name of the case.
        rounds: How often each of them is timed after a start.
        seconds: About how long it trains each time.
        starts: How often the processes of both are started. One start can be some
            percent faster than the next, with the places that its memory got, and
            its own rounds do not show it.

    Returns:
        The row. Its `noise` is up to 1 where the machine was quiet.
    """
    done = [_start(starter, comparison, case, rounds, seconds) for _ in range(starts)]
    pairing = Pairing(tuple(round for start in done for round in start.pairing.rounds))
    speeds = pairing.speeds
    used, idle = (sum(parts) for parts in zip(*(s.seconds for s in done), strict=True))
    others = statistics.mean(start.others for start in done)
    low, high = speeds[CPU].spread
    return {
        "backend": comparison.backend,
        "case": f"{case}: {comparison.name}",
        "peer": comparison.peer,
        "aim": comparison.aim,
        "speeds": {unit: dataclasses.asdict(speed) for unit, speed in speeds.items()},
        "once_seconds": fixed_seconds(pairing),
        "first_step_seconds": _medians(start.first_steps for start in done),
        "peak_mb": _medians(start.peaks for start in done),
        "steps": done[-1].steps,
        "starts": starts,
        "others": others,
        # Of what both used, what a side used when it was not its turn.
        "idle": idle / used,
        "load": os.getloadavg()[0],
        "noise": max(others / OTHERS, (high - low) / WIDTH),
    }


def fixed_seconds(pairing: Pairing) -> tuple[float, float]:
    """Return the fixed seconds of a call of ours, and of the peer."""
    ours, peers = zip(*pairing.rounds, strict=True)
    return (
        statistics.median(fixed for _, fixed in ours),
        statistics.median(fixed for _, fixed in peers),
    )


def _start(
    starter: WarmStarter, comparison: Comparison, case: str, rounds: int, seconds: float
) -> _Start:
    """Start the processes of both sides, time them in turn, and end them."""
    with contextlib.ExitStack() as stack:
        sides: list[Sided] = []
        for ours in True, False:
            sides.append(stack.enter_context(Sided(starter, comparison, ours, case)))
            sides[-1].ready()  # each has the machine for its first step
        mine, peer = sides
        steps = warm(mine.train, peer.train, seconds, comparison.min_steps)
        others, before = OtherLoad(), _used(sides)
        pairing = compare(mine.train, peer.train, steps, rounds)
        used, idle = (a - b for a, b in zip(_used(sides), before, strict=True))
        share = others.share(used)
        peaks = mine.peak_mb, peer.peak_mb
    firsts = mine.first_step, peer.first_step
    return _Start(steps, pairing, (used, idle), share, firsts, peaks)


def _medians(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [statistics.median(side) for side in zip(*pairs, strict=True)]


def _used(sides: list[Sided]) -> tuple[float, float]:
    """Return the CPU seconds of both sides, and those outside of their turns."""
    return sum(side.cpu for side in sides), sum(side.idle for side in sides)
