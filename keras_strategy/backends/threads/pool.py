"""The threads that replicas run in, for as long as their group lives."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from keras_strategy.backends.threads.interrupt import interrupt

_EXIT_TIMEOUT = 10.0  # seconds for all threads together

# Strong references, for a thread that has left Python still clears its thread-locals.
_threads: "list[_Thread]" = []


class Pool:
    """Threads that each do one call at a time.

    A thread keeps its replica, because Keras and the engines hold settings, caches and
    the current device for each thread.

    Args:
        names: The threads' names.
    """

    def __init__(self, names: Sequence[str]):
        self._threads = [_Thread(name) for name in names]
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        for thread in self._threads:
            thread.start()
            _threads.append(thread)
        weakref.finalize(self, _stop, self._threads).atexit = False

    def submit(self, calls: Sequence[Callable[[], None]]) -> None:
        """Makes one call in each thread, and does not wait for it.

        Args:
            calls: One call for each thread. They raise nothing.
        """
        for thread, call in zip(self._threads, calls, strict=True):
            thread.calls.put(call)

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in every thread, where it next runs Python."""
        interrupt(self._threads)

    def abandon(self) -> None:
        """Leaves threads to themselves that do not come back from what they wait for.

        Not even the interpreter waits for them when it ends.
        """
        _threads[:] = [thread for thread in _threads if thread not in self._threads]


class _Thread(threading.Thread):
    # Knows nothing of its Pool, which must not be kept alive by their threads.
    def __init__(self, name: str):
        # Daemon: the interpreter must not wait for ever for a replica that hangs.
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue = queue.SimpleQueue()

    def run(self) -> None:
        try:
            while (call := self.calls.get()) is not None:
                call()
                # A waiting thread must not keep the last batch alive.
                del call
        except KeyboardInterrupt:
            """The call had ended when it was interrupted."""


def _stop(threads: Sequence[_Thread]) -> None:
    for thread in threads:
        thread.calls.put(None)


@atexit.register
def _end() -> None:
    """Stops all threads and waits for them.

    A daemon thread that still releases its last tensors while the interpreter ends is
    unwound in the middle of the engine's C++ code, which aborts the whole process.
    """
    _stop(_threads)
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread in _threads:
        thread.join(max(deadline - time.monotonic(), 0))
