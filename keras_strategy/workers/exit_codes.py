"""The exit codes that tell how a worker ended, for those who start workers.

An exception of the worker's own program is Python's 1, and a signal is the shell's 128
and its number. The others are those of sysexits.h that say about the same.
"""

NOT_FORMED = 69
"""The workers did not come together."""

PREEMPTED = 75
"""The worker was asked to end, and saved what it had done: start it again."""

PEER_FAILED = 76
"""Another worker failed, or all wait for each other."""

INTERRUPTED = 130
"""The worker was interrupted (SIGINT, Ctrl-C), as a shell has it."""
