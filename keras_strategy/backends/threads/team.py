"""What carries the replicas of a group, and what becomes of their errors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategy.backends.threads.pool import Pool
from keras_strategy.backends.threads.turns import ReplicaStopped, TurnScheduler

# Seconds that an interrupted run waits for replicas that do not run Python just now.
_PATIENCE = 3.0


class ReplicaThreads:
    """The replicas of a group: the first in the thread that calls, others in their own.

    Args:
        devices: Canonical names of the replicas' devices.
    """

    def __init__(self, devices: Sequence[str]):
        self._names = [f"keras_strategy {name}" for name in devices[1:]]
        self._pool: Pool | None = None

    def call(self, turns: TurnScheduler, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes one call for each replica, in turns.

        Args:
            turns: Those of this run.
            calls: One call for each replica.

        Returns:
            What each of them returned.

        Raises:
            BaseException: What one of them raised, when all have ended.
        """
        if self._pool is None:
            self._pool = Pool(self._names)
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException | None] = [None] * len(calls)

        def carry(party):
            try:
                turns.begin(party)
                results[party] = calls[party]()
            except BaseException as error:
                errors[party] = error
                turns.fail()
            finally:
                turns.end(party)

        self._pool.submit(
            [functools.partial(carry, party) for party in range(1, len(calls))]
        )
        try:
            carry(0)
            if isinstance(errors[0], KeyboardInterrupt):
                raise errors[0]
            turns.wait_for_all()
        except KeyboardInterrupt:
            turns.fail()
            self._interrupt(turns)
            raise
        raised = [error for error in errors if error is not None]
        if raised:
            causes = [e for e in raised if not isinstance(e, ReplicaStopped)]
            raise causes[0] if causes else raised[0]
        return results

    def _interrupt(self, turns: TurnScheduler) -> None:
        """Ends the replicas that are left when this thread was interrupted."""
        assert self._pool is not None
        pool, self._pool = self._pool, None
        pool.interrupt()
        if not turns.wait_for_all(_PATIENCE):
            pool.abandon()
