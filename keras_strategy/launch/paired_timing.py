"""What others take of this machine while something is measured.

Two programs timed in turn, and the ratio of the two.

A shared machine is faster in one minute than in the next. So the two alternate
(A B A B ...), every ratio is taken between neighbours, and the median of the ratios is
what counts. In its turn a program trains for a short and a long time: what a call costs
beside its steps, once, is in both, and so not in their difference.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


class OtherLoad:
    """The share of the machine's processors that went to others since this was made.

    That is what all processes used and the machine's owner kept (steal), without our
    own processes' time.
    """

    def __init__(self) -> None:
        self._began, self._busy = time.monotonic(), _busy_seconds()

    def share(self, own: float) -> float:
        """Gives the share, from 0 to 1.

        Args:
            own: The seconds of processors that we used meanwhile.
        """
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, _busy_seconds() - self._busy - own) / elapsed


def _busy_seconds() -> float:
    """What all processors worked since the machine started; 0 where no one tells."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(
        int, _STAT.read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# Trains for so many steps; returns the seconds it took by the unit of their speed.
Turn = Callable[[int], dict[str, float]]
WALL = "steps/s"
# Of all threads of all processes: where they share cores, the one that waits is free.
CPU = "steps/CPU-s"

SHORT = 8  # a short time is so much shorter than a long one


@dataclass(frozen=True)
class Speed:
    """Ours against the peer's, in one unit.

    Attributes:
        ours: The median of our speeds.
        peer: The median of the peer's.
        ratio: The median of the paired ratios, ours / peer: higher is better.
        spread: Their quartiles.
    """

    ours: float
    peer: float
    ratio: float
    spread: tuple[float, float]

    @property
    def width(self) -> float:
        """How far the quartiles are apart."""
        return self.spread[1] - self.spread[0]


# What a side took in a round: seconds of a step by unit, and of a call beside them.
Taken = tuple[dict[str, float], float]


@dataclass(frozen=True)
class Pairing:
    """What the rounds gave.

    Attributes:
        rounds: What ours took, and the peer.
    """

    rounds: tuple[tuple[Taken, Taken], ...] = ()

    def __add__(self, other: "Pairing") -> "Pairing":
        """The rounds of both."""
        return Pairing(self.rounds + other.rounds)

    @property
    def speeds(self) -> dict[str, Speed]:
        """By unit."""
        return {
            unit: _speed(
                [(mine[0][unit], peers[0][unit]) for mine, peers in self.rounds]
            )
            for unit in self.rounds[0][0][0]
        }

    @property
    def once(self) -> tuple[float, float]:
        """Seconds that a call of ours, and of the peer, takes beside its steps."""
        mine, peers = zip(*self.rounds, strict=True)
        return (
            statistics.median(once for _, once in mine),
            statistics.median(once for _, once in peers),
        )


def warm(ours: Turn, peer: Turn, seconds: float) -> int:
    """Finds how many steps take the peer so long; both are warm afterwards."""
    steps = SHORT
    for _ in range(3):  # what a call costs once counts less and less
        ours(steps)
        rate = steps / peer(steps)[WALL]
        steps = max(SHORT, min(8 * steps, round(rate * seconds)))
    # So that both lengths are multiples of 8, where steps are executed by eights.
    steps = steps if steps < 64 else steps // 64 * 64
    for turn in ours, peer:
        turn(max(1, steps // SHORT))
        turn(steps)
    return steps


def compare(ours: Turn, peer: Turn, steps: int, rounds: int) -> Pairing:
    """Times two programs in turn.

    Args:
        ours: The one.
        peer: The other.
        steps: Of the long time of a round.
        rounds: How often each of them is timed.
    """
    return Pairing(
        tuple((_round(ours, steps), _round(peer, steps)) for _ in range(rounds))
    )


def _round(turn: Turn, steps: int) -> Taken:
    """The seconds of a step, by unit, and those that a call takes beside its steps."""
    few = max(1, steps // SHORT)
    short, long = turn(few), turn(steps)
    step = {unit: (long[unit] - short[unit]) / (steps - few) for unit in long}
    return step, short[WALL] - few * step[WALL]


def _speed(seconds: list[tuple[float, float]]) -> Speed:
    ratios = [peer / ours for ours, peer in seconds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speed(
        ours=1 / statistics.median(ours for ours, _ in seconds),
        peer=1 / statistics.median(peer for _, peer in seconds),
        ratio=statistics.median(ratios),
        spread=(low, high),
    )
