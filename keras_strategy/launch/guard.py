"""Ends the workers' groups when their launcher is gone: `guard.py`.

Workers die with the launcher, the processes that they have started do not. It is run
by its path, as a process that no signal to the launcher's group reaches, and reads from
its stdin which groups there are: `+ID` and `-ID`, a line each. At the end of that, the
launcher is gone or done, and what is left is killed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads until the launcher has ended."""
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
