"""Becomes a command that dies with its parent: `starter.py PARENT_PID COMMAND...`.

It is run by its path, in an interpreter of its own, and imports nothing but the
standard library. What it sets survives `exec`, so the worker is exactly the command.
`preexec_fn` of `subprocess` would do the same between fork and exec, where the locks of
an engine's threads may be held for ever.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Replaces this process by a command, unless the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the line above.
    if os.getppid() != parent:
        sys.exit(f"The process {parent} that wanted {command} is gone.")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
