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


def exit_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends.

    Args:
        parent: The id of that parent. If it is gone already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the line above.
    if os.getppid() != parent:
        sys.exit(f"The process {parent} that wanted {sys.argv} is gone.")


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
