"""The threads that the replicas run in, one each, for as long as their group lives."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

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
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            _Thread(index, name, self._results) for index, name in enumerate(names)
        ]
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        for thread in self._threads:
            thread.start()
            _threads.append(thread)
        weakref.finalize(self, _stop, self._threads).atexit = False

    def call(
        self, calls: Sequence[Callable[[], Any]], abort: Callable[[], None]
    ) -> list[tuple[Any, BaseException | None]]:
        """Makes one call in each thread, and waits for all.

        Args:
            calls: One call for each thread.
            abort: Called to end them early when this thread is interrupted.

        Returns:
            For each thread what its call returned and what it raised.
        """
        for thread, call in zip(self._threads, calls, strict=True):
            thread.calls.put(call)
        results: list[Any] = [None] * len(calls)
        waiting = len(calls)
        interrupt: BaseException | None = None
        while waiting:
            try:
                index, result = self._results.get()
            except KeyboardInterrupt as error:
                # The threads' state must not be left running behind our back.
                abort()
                interrupt = error
                continue
            results[index] = result
            waiting -= 1
        if interrupt is not None:
            raise interrupt
        return results


class _Thread(threading.Thread):
    # Knows nothing of its Pool, which must not be kept alive by their threads.
    def __init__(self, index: int, name: str, results: queue.SimpleQueue):
        # Daemon: the interpreter must not wait for ever for a replica that hangs.
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self._index = index
        self._results = results

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                result = call(), None
            except BaseException as error:
                result = None, error
            self._results.put((self._index, result))
            # A waiting thread must not keep the last batch alive.
            del call, result


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
