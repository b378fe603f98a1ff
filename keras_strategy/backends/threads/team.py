"""One thread for each replica, and what becomes of their errors."""

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategy.backends.threads.pool import Pool
from keras_strategy.backends.threads.rendezvous import Rendezvous, ReplicaStopped


class Team:
    """The threads of a group of replicas, started when first needed.

    Args:
        devices: Canonical names of the replicas' devices.
    """

    def __init__(self, devices: Sequence[str]):
        self.rendezvous = Rendezvous(len(devices))
        self._names = [f"keras_strategy {name}" for name in devices]
        self._pool: Pool | None = None

    def call(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes one call in each thread.

        Args:
            calls: One call for each replica.

        Returns:
            What each of them returned.

        Raises:
            BaseException: What one of them raised, when all have ended.
        """
        if self._pool is None:
            self._pool = Pool(self._names)

        def guarded(call):
            def call_or_abort():
                try:
                    return call()
                except BaseException:
                    self.rendezvous.abort()
                    raise

            return call_or_abort

        results = self._pool.call(
            [guarded(call) for call in calls], self.rendezvous.abort
        )
        errors = [error for _, error in results if error is not None]
        if errors:
            self.rendezvous.reset()
            causes = [e for e in errors if not isinstance(e, ReplicaStopped)]
            raise causes[0] if causes else errors[0]
        return [result for result, _ in results]
