"""Two programs timed in turn, and the ratio of the two.

A shared machine is faster in one minute than in the next. So the two alternate
(A B A B ...), every ratio is taken between neighbours, and the median of the ratios is
what counts.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# Trains for so many steps, and returns when the devices have finished them.
Train = Callable[[int], None]


@dataclass(frozen=True)
class Speed:
    """Ours against the peer's, in one unit.

    Attributes:
        ours: The median of our speeds.
        peer: The median of the peer's.
        ratio: The median of the paired ratios, ours / peer: higher is better.
        spread: Their quartiles.
        unit: What the speeds are counted in.
    """

    ours: float
    peer: float
    ratio: float
    spread: tuple[float, float]
    unit: str


@dataclass(frozen=True)
class Clock:
    """What a round is timed with.

    Attributes:
        unit: The unit of the speed that it gives.
        read: Gives seconds.
    """

    unit: str
    read: Callable[[], float]


WALL = Clock("steps/s", time.perf_counter)
# Of all threads of this process: where they share cores, the one that waits is free.
CPU = Clock("steps/CPU-s", time.process_time)


def compare(
    ours: Train,
    peer: Train,
    rounds: int,
    seconds: float,
    clocks: tuple[Clock, ...] = (WALL, CPU),
    together: Callable[[float], float] = float,
) -> list[Speed]:
    """Times two programs in turn.

    Args:
        ours: The one.
        peer: The other.
        rounds: How often each of them is timed.
        seconds: About how long it trains each time.
        clocks: What to time it with.
        together: Makes one number of what several processes have, the same in all;
            it also brings them to one place before a round.

    Returns:
        A `Speed` for each clock.
    """
    steps = _steps_for(seconds, ours, peer, together)
    speeds: list[list[tuple[float, float]]] = [[] for _ in clocks]
    for _ in range(rounds):
        mine = _timed(ours, steps, clocks, together)
        theirs = _timed(peer, steps, clocks, together)
        for kept, pair in zip(speeds, zip(mine, theirs, strict=True), strict=True):
            kept.append(pair)
    return [
        _speed(pairs, clock.unit) for pairs, clock in zip(speeds, clocks, strict=True)
    ]


def _steps_for(
    seconds: float, ours: Train, peer: Train, together: Callable[[float], float]
) -> int:
    """How many steps take so long; both programs are warm afterwards."""
    steps = 4
    for _ in range(3):  # the first compiles, and what a call costs counts less and less
        ours(steps)
        (rate,) = _timed(peer, steps, (WALL,), together)
        steps = max(4, min(8 * steps, round(rate * seconds)))
    ours(steps)
    peer(steps)
    return steps


def _timed(
    train: Train,
    steps: int,
    clocks: tuple[Clock, ...],
    together: Callable[[float], float],
) -> list[float]:
    gc.collect()
    together(0.0)
    before = [clock.read() for clock in clocks]
    train(steps)
    after = [clock.read() for clock in clocks]
    return [
        steps / together(end - begin) for begin, end in zip(before, after, strict=True)
    ]


def _speed(pairs: list[tuple[float, float]], unit: str) -> Speed:
    ratios = [ours / peer for ours, peer in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speed(
        ours=statistics.median(ours for ours, _ in pairs),
        peer=statistics.median(peer for _, peer in pairs),
        ratio=statistics.median(ratios),
        spread=(low, high),
        unit=unit,
    )
