"""The threads that the replicas run in, one each, for as long as their group lives."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any


class Workers:
    """Threads that each do one call at a time.

    A thread keeps its replica, because Keras and the engines hold settings, caches and
    the current device for each thread.

    Args:
        names: The threads' names.
    """

    def __init__(self, names: Sequence[str]):
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._calls = [queue.SimpleQueue() for _ in names]
        for index, name in enumerate(names):
            threading.Thread(
                # Not a bound method: the threads must not keep this object alive.
                target=_work,
                args=(index, self._calls[index], self._results),
                name=name,
                daemon=True,
            ).start()
        weakref.finalize(self, _stop, self._calls)

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
        for thread, call in zip(self._calls, calls, strict=True):
            thread.put(call)
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


def _work(index: int, calls: queue.SimpleQueue, results: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        try:
            result = call(), None
        except BaseException as error:
            result = None, error
        results.put((index, result))
        # A waiting thread must not keep the last batch alive.
        del call, result


def _stop(calls: Sequence[queue.SimpleQueue]) -> None:
    for thread in calls:
        thread.put(None)
