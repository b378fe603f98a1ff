"""Where the replicas' threads meet."""

import threading
from collections.abc import Callable
from typing import Any


class ReplicaStopped(RuntimeError):
    """Another replica failed while this one was waiting for it."""


class Rendezvous:
    """Combines one value from each of several threads into one result.

    Args:
        parties: The number of threads.
    """

    def __init__(self, parties: int):
        self._names = [""] * parties
        self._values: list[Any] = [None] * parties
        self._combine: Callable[[list[Any]], Any] | None = None
        self._result: Any = None
        self._barrier = threading.Barrier(parties, action=self._act)

    def exchange(
        self,
        party: int,
        name: str,
        value: Any,
        combine: Callable[[list[Any]], Any],
    ) -> Any:
        """Waits for all threads, and returns the same result to each.

        Args:
            party: This thread's number.
            name: What the thread is doing; all must do the same.
            value: This thread's value.
            combine: Makes the result out of all values, in one of the threads.

        Returns:
            What `combine` returned. It is shared: nobody may change it.

        Raises:
            ReplicaStopped: If another thread failed.
            RuntimeError: If the threads are doing different things.
        """
        if len(self._values) == 1:
            return combine([value])
        self._names[party], self._values[party] = name, value
        self._combine = combine
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ReplicaStopped(f"another replica failed before `{name}`") from None
        # The next exchange can only act once this thread is there, so that the
        # result cannot change before it is read.
        return self._result

    def abort(self) -> None:
        """Wakes every waiting thread, and stops those that come later."""
        self._barrier.abort()

    def reset(self) -> None:
        """Makes it usable again after `abort`, when no thread is waiting."""
        self._values = [None] * len(self._values)
        self._result = None
        self._barrier.reset()

    def _act(self) -> None:
        if len(set(self._names)) > 1:
            told = ", ".join(f"{i}: {name}" for i, name in enumerate(self._names))
            raise RuntimeError(
                "All replicas must make the same calls in the same order. They are "
                f"in different ones ({told}). A collective, `optimizer.apply` or an "
                "assignment to an aggregated variable must not depend on the "
                "replica."
            )
        assert self._combine is not None
        values, self._values = self._values, [None] * len(self._values)
        self._result = self._combine(values)
