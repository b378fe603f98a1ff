"""Program that becomes a command which dies with its parent.

`starter.py PARENT_PID COMMAND...` is run by its path, in a new interpreter, and imports
only the standard library. What it sets survives `exec`, so the worker is exactly the
command. `preexec_fn` of `subprocess` would run between fork and exec, where the locks
of a backend's threads may be held for ever.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent `parent` ends.

    If the parent has ended already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the line above.
    if os.getppid() != parent:
        sys.exit(f"The parent process {parent} of {sys.argv} is gone.")


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
