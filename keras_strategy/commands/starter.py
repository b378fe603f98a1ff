"""Programs that keep processes from outliving their launcher.

This file is run by its path, in a new interpreter, and imports only the standard
library.

`starter.py PARENT_PID COMMAND...` becomes a command that dies with its parent. What it
sets survives `exec`, so the worker is exactly the command. `preexec_fn` of `subprocess`
would run between fork and exec, where the locks of a backend's threads may be held for
ever.

`starter.py` alone is a guard: it kills the processes that the workers have started. It
reads the process groups from its stdin, a line `+ID` or `-ID` each. When stdin ends,
the launcher is gone or done, and the guard kills the remaining groups. It runs in its
own session, so that no signal to the launcher's group reaches it.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends; exit if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the line above.
    if os.getppid() != parent:
        sys.exit(f"The parent process {parent} of {sys.argv} is gone.")


def guard() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        guard()
    else:
        exit_with_parent(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
