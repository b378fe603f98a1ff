"""Turns of a group's replicas, which run one at a time, in order, and their threads.

The first replica runs in the calling thread. The others have threads while their steps
need them, at most for as long as the group exists.
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

from keras_strategy.core.step_state import APPLY

_EXIT_TIMEOUT = 10.0  # seconds, for all threads together
# How long an interrupted run waits for replicas outside of Python code, in seconds.
_INTERRUPT_TIMEOUT = 3.0

# Strong references, since a thread clears its thread-locals after it left Python.
_threads: "list[_Thread]" = []


def _interrupt(threads: Iterable[threading.Thread]) -> None:
    """Raise KeyboardInterrupt in threads, when they next run Python."""
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )


@contextlib.contextmanager
def propagate_interrupts(threads: Iterable[threading.Thread]) -> Iterator[None]:
    """Let Ctrl-C interrupt threads that the main thread awaits."""
    # Python interrupts the main thread only. The threads are iterated when it happens.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # the user's handler decides
        return

    def interrupt_all(number, frame):
        _interrupt(threads)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt_all)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Pool:
    """Threads that each make one call at a time."""

    # A replica always runs in the same thread, because Keras and the backends have
    # thread-local settings, caches and devices.

    def __init__(self, names: Sequence[str]):
        self.threads = [_Thread(name) for name in names]
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        for thread in self.threads:
            thread.start()
            _threads.append(thread)
        weakref.finalize(self, _stop, self.threads).atexit = False

    def submit(self, calls: Sequence[Callable[[], None]]) -> None:
        """Start one call in each thread; calls must not raise."""
        for thread, call in zip(self.threads, calls, strict=True):
            thread.calls.put(call)


class _Thread(threading.Thread):
    # Without a reference to its Pool, which it would keep alive.
    def __init__(self, name: str):
        # A daemon, since the interpreter must not wait for a replica that hangs.
        super().__init__(name=name, daemon=True)
        self.calls: queue.SimpleQueue = queue.SimpleQueue()

    def run(self) -> None:
        try:
            while (call := self.calls.get()) is not None:
                call()
                # A waiting thread must not keep the last batch alive.
                del call
        except KeyboardInterrupt:
            """The call has already ended."""


def _stop(threads: Sequence[_Thread]) -> None:
    for thread in threads:
        thread.calls.put(None)


@atexit.register
def _end() -> None:
    """Stop all threads and wait for them."""
    # A daemon thread that releases tensors during interpreter shutdown is unwound in
    # the backend's C++ code, which aborts the process.
    _stop(_threads)
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for thread in _threads:
        thread.join(max(deadline - time.monotonic(), 0))


class ReplicaStopped(RuntimeError):
    """Raised in a replica that waits for another one, which failed."""


class KerasStep(functools.partial):
    """A step of Keras's own, and how often its replicas exchange values."""

    # A `partial`, since a call of it enters no other Python function.

    def __init__(self, fn: Callable[..., Any]):
        # By the part of a run, once that ran in threads.
        self.exchanges: dict[str, int] = {}


class TurnScheduler:
    """Runs the replicas of one run in turns."""

    # A turn lasts until the replica ends or needs the others. When all have reached the
    # same point, one of them combines their values into the result for all.
    #
    # Without an exchange the replicas run one after another in the calling thread. For
    # an exchange the others have threads, unless it is the only one: then each runs
    # inside the exchange of the one before. This is faster on a CPU, where each thread
    # has a pool of threads for its arithmetic, which together outnumber the cores.

    def __init__(self, replicas: int):
        self._names = [""] * replicas
        self._values: list[Any] = [None] * replicas
        self._result: Any = None
        self.has_failed = False  # True to stop every replica at its next turn
        # All wait at their gates, except for the first one.
        self._gates = [threading.Lock() for _ in range(replicas)]
        for gate in self._gates:
            gate.acquire()
        self._lock = threading.Lock()  # of the current and the running replicas
        self._all_ended = threading.Lock()
        self._all_ended.acquire()
        self.seed_generator: Any = None
        self.seed: int | None = None
        # What the first replica drew, and how many others still have to take it.
        self.drawn: dict[Any, list[Any]] = {}

    def begin(
        self,
        run_next: Callable[[], None],
        start_threads: Callable[[], None],
        has_one_exchange: bool,
    ) -> None:
        """Begin a call of all replicas, given two ways to run those after the first."""
        self._run_next, self._start_threads = run_next, start_threads
        self._has_one_exchange = has_one_exchange
        self.has_threads = False
        replicas = len(self._names)
        self._names = [""] * replicas
        self.exchanges = [0] * replicas  # that each replica has begun
        self._combined = 0  # exchanges
        self._running = list(range(replicas))
        self._current = 0

    def forget_calls(self) -> None:
        """Release the functions, which hold the results of the replicas."""
        del self._run_next, self._start_threads

    def exchange(
        self, replica: int, name: str, value: Any, combine: Callable[[list[Any]], Any]
    ) -> Any:
        """End a replica's turn, and return the combination of all replicas' values."""
        # All share the result of `combine`. The name of the operation must be equal.
        if len(self._values) == 1:
            return combine([value])
        self._names[replica], self._values[replica] = name, value
        self.exchanges[replica] += 1
        nests = self._has_one_exchange and name.startswith(APPLY)
        if not nests and self.exchanges[0] == 1 and replica == 0:
            self.has_threads = True
            self._start_threads()
        if self.has_threads:
            self._start_next(replica)
            self.wait(replica, f"`{name}`")
            if replica == 0:
                self._combine(combine)
        elif self.exchanges[replica] > 1:
            raise RuntimeError(
                f"This step calls `{name}` after `optimizer.apply`, and earlier ones "
                "did not. All steps of `fit` must make the same calls: make this one "
                "in every step."
            )
        elif replica + 1 < len(self._values) and self.exchanges[0]:
            self._run_next()
            if self.has_failed:
                raise ReplicaStopped(f"another replica failed before `{name}`")
        else:
            self._combine(combine)
        if self._combined < self.exchanges[replica]:
            self._check_names()  # the replica that should have combined has ended
        return self._result

    def _combine(self, combine: Callable[[list[Any]], Any]) -> None:
        self._check_names()
        # Release the values before the replicas continue.
        values, self._values = self._values, [None] * len(self._values)
        self._result = combine(values)
        self._combined += 1

    def _check_names(self) -> None:
        if len(set(self._names)) > 1:
            names = ", ".join(f"{i}: {name}" for i, name in enumerate(self._names))
            raise RuntimeError(
                "All replicas must make the same calls in the same order. They are "
                f"in different ones ({names}). A collective, `optimizer.apply` or "
                "an assignment to an aggregated variable must not depend on the "
                "replica."
            )

    def end(self, replica: int) -> None:
        """End a replica, which may have been interrupted in another one's turn."""
        with self._lock:
            self._names[replica] = "the end of the function"
            self._running.remove(replica)
            is_next_due = self.has_threads and self._current == replica
        if is_next_due:
            self._start_next(replica)

    def wait_for_all(self, seconds: float = -1) -> bool:
        """Wait until all threads have ended; return False after a timeout."""
        return not self.has_threads or self._all_ended.acquire(timeout=seconds)

    def wait(self, replica: int, before: str) -> None:
        self._gates[replica].acquire()
        if self.has_failed:
            raise ReplicaStopped(f"another replica failed before {before}")

    def _start_next(self, replica: int) -> None:
        with self._lock:
            if not self._running:
                self._all_ended.release()
                return
            later = [other for other in self._running if other > replica]
            self._current = (later or self._running)[0]
            gate = self._gates[self._current]
        gate.release()


class ReplicaThreads:
    """The threads of a group's replicas, given the canonical names of their devices."""

    def __init__(self, devices: Sequence[str]):
        self._names = [f"keras_strategy {name}" for name in devices[1:]]
        self._pool: Pool | None = None

    def call(
        self,
        turns: TurnScheduler,
        calls: Sequence[Callable[[], Any]],
        has_one_exchange: bool = False,
    ) -> list[Any]:
        """Make one call for each replica, in turns, and return the results."""
        # Raise the error of one of them when all have ended.
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException | None] = [None] * len(calls)
        begun = 0  # in the calling thread
        pool = None

        def run_replica(replica, in_thread=False):
            try:
                if in_thread:
                    turns.wait(replica, "its first turn")
                results[replica] = calls[replica]()
            except BaseException as error:
                errors[replica] = error
                turns.has_failed = True
            finally:
                turns.end(replica)

        def run_next():
            nonlocal begun
            begun += 1
            run_replica(begun - 1)

        def start_threads():
            nonlocal pool
            pool = self._pool = self._pool or Pool(self._names)
            others = range(1, len(calls))
            pool.submit([functools.partial(run_replica, r, True) for r in others])

        turns.begin(run_next, start_threads, has_one_exchange)
        try:
            while begun < len(calls) and not (turns.has_threads or turns.has_failed):
                run_next()
            if isinstance(errors[0], KeyboardInterrupt):
                raise errors[0]
            turns.wait_for_all()
        except KeyboardInterrupt:
            turns.has_failed = True
            self._pool = None
            threads = [] if pool is None else pool.threads
            _interrupt(threads)
            if not turns.wait_for_all(_INTERRUPT_TIMEOUT):
                # They hang. The interpreter does not wait for them.
                _threads[:] = [t for t in _threads if t not in threads]
            pool = None  # ends its threads, although the traceback keeps this frame
            raise
        finally:
            turns.forget_calls()
        if has_one_exchange and not turns.has_threads:
            self._pool = None  # its OpenMP threads would wait for work
        raised = [error for error in errors if error is not None]
        if raised:
            causes = [e for e in raised if not isinstance(e, ReplicaStopped)]
            raise causes[0] if causes else raised[0]
        return results
