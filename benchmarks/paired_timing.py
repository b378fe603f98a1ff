"""Timing of two programs in turn, and the ratio of their speeds.

A shared machine is faster in one minute than in the next. So the two alternate
(A B A B ...), every ratio is taken between neighbours, and the median of the ratios
counts. In its turn a program trains for a short and a long time: the fixed cost of a
call is in both, so it cancels in their difference.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Trains so many steps; returns the seconds it took, by the unit of the speed.
Turn = Callable[[int], dict[str, float]]
# Seconds of a step by unit, and the fixed seconds of a call.
Times = tuple[dict[str, float], float]

WALL = "steps/s"
# CPU time of all threads and processes: where they share cores, waiting costs nothing.
CPU = "steps/CPU-s"
SHORT = 8  # ratio of the long to the short time

_PROC_STAT = Path("/proc/stat")


def turn_of(train: Callable[[int], object]) -> Turn:
    """Return the turn of a program of this process."""

    def turn(steps: int) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        train(steps)
        cpu_seconds = time.process_time() - cpu
        return {WALL: time.perf_counter() - wall, CPU: cpu_seconds}

    return turn


@dataclass(frozen=True)
class Speed:
    """Medians of our speeds, the peer's, and the paired ratios (higher is better)."""

    ours: float
    peer: float
    ratio: float
    # The quartiles of the ratios.
    spread: tuple[float, float]


@dataclass(frozen=True)
class Pairing:
    """Times of all rounds: in each, ours and the peer's."""

    rounds: tuple[tuple[Times, Times], ...]

    @property
    def speeds(self) -> dict[str, Speed]:
        speeds = {}
        for unit in self.rounds[0][0][0]:
            ours = [own[unit] for (own, _), _ in self.rounds]
            peer = [theirs[unit] for _, (theirs, _) in self.rounds]
            ratios = [theirs / own for own, theirs in zip(ours, peer, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
            medians = 1 / statistics.median(ours), 1 / statistics.median(peer)
            speeds[unit] = Speed(*medians, statistics.median(ratios), (low, high))
        return speeds

    @property
    def fixed_seconds(self) -> tuple[float, float]:
        """The fixed seconds of a call of ours, and of the peer."""
        ours, peer = ([times[i][1] for times in self.rounds] for i in (0, 1))
        return statistics.median(ours), statistics.median(peer)


def warm(ours: Turn, peer: Turn, seconds: float, min_steps: int = SHORT) -> int:
    """Warm up both; return how many steps take the peer so many seconds."""
    steps = SHORT
    for _ in range(3):  # the fixed cost of a call counts less each time
        ours(steps)
        rate = steps / peer(steps)[WALL]
        steps = max(min_steps, min(8 * steps, round(rate * seconds)))
    # Both lengths become multiples of 8, where 8 steps are compiled into one.
    steps = steps if steps < 64 else steps // 64 * 64
    for turn in ours, peer:
        turn(max(1, steps // SHORT))
        turn(steps)
    return steps


def compare(ours: Turn, peer: Turn, steps: int, rounds: int) -> Pairing:
    """Time two programs in turn, with `steps` in the long time of each round."""
    short = max(1, steps // SHORT)
    pairs = (
        (_time(ours, short, steps), _time(peer, short, steps)) for _ in range(rounds)
    )
    return Pairing(tuple(pairs))


def _time(turn: Turn, few: int, many: int) -> Times:
    short, long = turn(few), turn(many)
    step = {unit: (long[unit] - short[unit]) / (many - few) for unit in long}
    return step, short[WALL] - few * step[WALL]


def seconds_per_call(
    call: Callable[[int], object], few: int, many: int, rounds: int = 7
) -> float:
    """Return the seconds of one of so many calls, without what does not grow with them.

    The times of `few` and `many` calls are subtracted.
    """
    call(few), call(many)
    times = [_time(turn_of(call), few, many) for _ in range(rounds)]
    return statistics.median(step[WALL] for step, _ in times)


class OtherLoad:
    """Other processes' use of this machine, hypervisor included, from now on."""

    def __init__(self) -> None:
        self._began, self._busy = time.monotonic(), _busy_seconds()

    def share(self, own: float) -> float:
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, _busy_seconds() - self._busy - own) / elapsed


def _busy_seconds() -> float:
    """Return the CPU seconds since the machine started; 0 where they are unknown."""
    if not _PROC_STAT.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(
        int, _PROC_STAT.read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
