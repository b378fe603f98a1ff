"""Ctrl-C, which Python tells the main thread alone.

The threads that replicas run in, for as long as their group lives.

Replicas that are threads run one at a time, in their order.

What carries the replicas of a group, and what becomes of their errors.
"""

import atexit
import contextlib
import ctypes
import functools
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def interrupt(threads: Iterable[threading.Thread]) -> None:
    """Raises KeyboardInterrupt in threads, where they next run Python."""
    for thread in threads:
        identifier = ctypes.c_ulong(thread.ident or 0)
        interrupt = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, interrupt)


@contextlib.contextmanager
def propagate_interrupts(threads: Iterable[threading.Thread]) -> Iterator[None]:
    """Lets Ctrl-C interrupt threads too that the main thread will wait for.

    Args:
        threads: The threads, asked for when it comes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else looks after it
        return

    def interrupt_all(number, frame):
        interrupt(threads)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt_all)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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

    def call(
        self, turns: TurnScheduler, calls: Sequence[Callable[[], Any]]
    ) -> list[Any]:
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
