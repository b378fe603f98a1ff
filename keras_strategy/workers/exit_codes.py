"""Exit codes of workers, read by the programs that start them.

An exception in the user's program gives Python's 1 and a signal the shell's 128 plus
its number. The other codes are those of sysexits.h with the nearest meaning.
"""

EXIT_CLUSTER_NOT_FORMED = 69
"""The cluster was not formed."""

EXIT_PREEMPTED = 75
"""The worker was asked to stop and saved its state: start it again."""

EXIT_OTHER_WORKER_FAILED = 76
"""Another worker failed, or all workers wait for each other."""

EXIT_INTERRUPTED = 130
"""The worker was interrupted (SIGINT, Ctrl-C), as in a shell."""
