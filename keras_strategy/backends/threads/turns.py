"""Replicas that are threads run one at a time, in their order."""

import threading
from collections.abc import Callable
from typing import Any


class ReplicaStopped(RuntimeError):
    """Another replica failed while this one was waiting for it."""


class TurnScheduler:
    """Lets the replicas of one run go on in turns.

    A replica goes on until it needs the others or ends. Then the next one does. When
    all have come to the same point, the first one makes of what they brought what
    each of them goes on with.

    Args:
        parties: The number of replicas.
    """

    def __init__(self, parties: int):
        self._names = [""] * parties
        self._values: list[Any] = [None] * parties
        self._result: Any = None
        self._failed = False
        # The others wait at their gates. The first one begins.
        self._gates = [threading.Lock() for _ in range(parties)]
        for gate in self._gates:
            gate.acquire()
        self._left = list(range(parties))
        self.on_turn = 0
        self._lock = threading.Lock()  # of who is on turn, and who is left
        self._all_ended = threading.Lock()
        self._all_ended.acquire()
        self.seed_generator: Any = None

    def begin(self, party: int) -> None:
        """Waits for a replica's first turn.

        Raises:
            ReplicaStopped: If another one has failed before it came.
        """
        if party > 0:
            self._wait(party, "its first turn")

    def exchange(
        self,
        party: int,
        name: str,
        value: Any,
        combine: Callable[[list[Any]], Any],
    ) -> Any:
        """Ends a replica's turn, and returns the same result to each of them.

        Args:
            party: The replica's number.
            name: What it is doing; all must do the same.
            value: Its value.
            combine: Makes the result out of all values. The first replica calls it.

        Returns:
            What `combine` returned. It is shared: nobody may change it.

        Raises:
            ReplicaStopped: If another replica failed.
            RuntimeError: If the replicas are doing different things.
        """
        if len(self._values) == 1:
            return combine([value])
        self._names[party], self._values[party] = name, value
        self._pass_on(party)
        self._wait(party, f"`{name}`")
        if party == 0:
            self._require_one_name()
            # What it is made of can be freed before the replicas go on.
            values, self._values = self._values, [None] * len(self._values)
            self._result = combine(values)
        return self._result

    def fail(self) -> None:
        """Stops every replica when its next turn comes."""
        self._failed = True

    def end(self, party: int) -> None:
        """Ends a replica, which may have been interrupted in another one's turn."""
        with self._lock:
            self._left.remove(party)
            on_turn = self.on_turn == party
        if on_turn:
            self._pass_on(party)

    def wait_for_all(self, seconds: float = -1) -> bool:
        """Waits until all replicas have ended, and returns whether they have."""
        return self._all_ended.acquire(timeout=seconds)

    def _wait(self, party: int, before: str) -> None:
        self._gates[party].acquire()
        if self._failed:
            raise ReplicaStopped(f"another replica failed before {before}")

    def _pass_on(self, party: int) -> None:
        with self._lock:
            if not self._left:
                self._all_ended.release()
                return
            later = [other for other in self._left if other > party]
            self.on_turn = (later or self._left)[0]
            gate = self._gates[self.on_turn]
        gate.release()

    def _require_one_name(self) -> None:
        if len(set(self._names)) > 1:
            told = ", ".join(f"{i}: {name}" for i, name in enumerate(self._names))
            raise RuntimeError(
                "All replicas must make the same calls in the same order. They are "
                f"in different ones ({told}). A collective, `optimizer.apply` or an "
                "assignment to an aggregated variable must not depend on the "
                "replica."
            )
