"""Program that kills the workers' process groups when their launcher is gone.

Workers die with the launcher, but not the processes that they have started. The guard
is run by its path, in its own session, so that no signal to the launcher's group
reaches it. It reads the groups from its stdin, a line `+ID` or `-ID` each. When stdin
ends, the launcher is gone or done, and the guard kills the remaining groups.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Follow the launcher's groups until it has ended, then kill the rest."""
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main()
