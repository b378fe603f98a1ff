"""What others take of this machine while something is measured."""

import os
import time
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
