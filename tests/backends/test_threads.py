"""The threads that replicas run in, by themselves."""

import functools
import subprocess
import sys
import threading

import pytest

from keras_strategy.backends.threads.pool import ReplicaThreads, TurnScheduler

SLOW_TO_RELEASE = """
import threading, time
from keras_strategy.backends.threads.pool import Pool

class Slow:
    def __del__(self):
        time.sleep(0.3)
        print("released\\n", end="", flush=True)  # whole lines, from two threads

kept = threading.local()

def call():
    kept.value = Slow()

pool = Pool(["replica 0", "replica 1"])
pool.submit([call, call])
"""


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )


def test_process_ends_after_its_threads():
    # A thread that the interpreter ends while it releases a tensor aborts the process.
    ended = run(SLOW_TO_RELEASE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["released", "released"]


def test_pool_threads_end_with_their_owner():
    ended = run(
        SLOW_TO_RELEASE.replace("time.sleep(0.3)", "goes_on.wait(), time.sleep(0.3)")
        + """
goes_on = threading.Event()
del pool
while len(threading.enumerate()) > 1:
    time.sleep(0.01)
print(1, flush=True)
goes_on.set()
"""
    )
    assert ended.returncode == 0, ended.stderr
    # They are out of Python, and still waited for.
    assert ended.stdout.split() == ["1", "released", "released"]


def ran(*programs, has_one_exchange=False):
    """Record the operations of replicas in order.

    Args:
        *programs: For each replica the names of the collectives that it makes; a
            name that is an exception is raised.
        has_one_exchange: What the caller knows of a collective by `optimizer.apply`.
    """
    turns = TurnScheduler(len(programs))
    seen = []

    def replica(party):
        def call():
            for name in programs[party]:
                seen.append(f"{party} {name}")
                if isinstance(name, Exception):
                    raise name
                turns.exchange(party, name, party, lambda parts: seen.append(parts))
            seen.append(f"{party} ends")

        return call

    error = None
    try:
        calls = [replica(i) for i in range(len(programs))]
        ReplicaThreads("abc"[: len(calls)]).call(turns, calls, has_one_exchange)
    except Exception as raised:
        error = raised
    return seen, error


def threads_of_replicas(collective=None, **options):
    threads, turns = {}, TurnScheduler(3)

    def make_call(replica):
        def call():
            if collective is not None:
                turns.exchange(replica, collective, None, len)
            threads[replica] = threading.current_thread()

        return call

    calls = [make_call(replica) for replica in range(3)]
    ReplicaThreads("abc").call(turns, calls, **options)
    is_here = [threads[i] is threading.current_thread() for i in range(3)]
    return is_here, len(set(threads.values()))


def test_replicas_take_turns_in_order():
    expected = ["0 x", "1 x", "2 x", [0, 1, 2], "0 ends", "1 ends", "2 ends"]
    assert ran(["x"], ["x"], ["x"]) == (expected, None)


def test_replicas_with_one_exchange_run_inside_each_other():
    names = ["optimizer.apply"]
    seen, error = ran(names, names, names, has_one_exchange=True)
    assert error is None
    begun = [f"{i} optimizer.apply" for i in range(3)]
    assert seen == [*begun, [0, 1, 2], "2 ends", "1 ends", "0 ends"]


def test_replicas_have_threads_for_exchanges():
    assert threads_of_replicas("x") == ([True, False, False], 3)
    # It is not known what surrounds another collective.
    assert threads_of_replicas("x", has_one_exchange=True) == ([True, False, False], 3)


def test_replicas_run_in_calling_thread():
    assert threads_of_replicas() == ([True, True, True], 1)
    nested = threads_of_replicas("optimizer.apply", has_one_exchange=True)
    assert nested == ([True, True, True], 1)


def test_threads_end_when_steps_need_none():
    replicas = ReplicaThreads(["a", "a replica's own name"])

    def call(has_one_exchange):
        turns = TurnScheduler(2)

        def exchange(replica):
            turns.exchange(replica, "optimizer.apply", None, len)

        calls = [functools.partial(exchange, replica) for replica in range(2)]
        replicas.call(turns, calls, has_one_exchange)
        return [t for t in threading.enumerate() if "own name" in t.name]

    (thread,) = call(has_one_exchange=False)
    assert call(has_one_exchange=False) == [thread]
    call(has_one_exchange=True)
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("programs", "seen"),
    [
        # Those that have not begun never do; those that wait end.
        ([["boom"], ["x"], ["x"]], ["0 boom"]),
        ([["x"], ["boom"], ["x"]], ["0 x", "1 boom"]),
        ([["x"], ["x"], ["boom"]], ["0 x", "1 x", "2 boom"]),
    ],
)
def test_error_ends_other_replicas_and_is_reraised(programs, seen):
    boom = ArithmeticError("boom")
    programs = [[boom if n == "boom" else n for n in names] for names in programs]
    assert ran(*programs) == (seen, boom)


def test_differing_collectives_are_reported():
    seen, error = ran(["x"], ["x"], ["y"])
    assert seen == ["0 x", "1 x", "2 y"]
    assert "0: x, 1: x, 2: y" in str(error)


@pytest.mark.parametrize(
    ("programs", "named"),
    [
        ([[], ["x"]], "0: the end of the function, 1: x"),
        ([["x"], []], "0: x, 1: the end of the function"),
        ([["x"], ["x", "x"]], "0: the end of the function, 1: x"),
        ([["x", "x"], ["x"]], "0: x, 1: the end of the function"),
    ],
)
def test_missing_collective_is_reported(programs, named):
    assert named in str(ran(*programs)[1])


def test_step_with_one_exchange_is_checked():
    name, boom = "optimizer.apply", ArithmeticError("boom")
    assert ran([name], [name], [boom], has_one_exchange=True) == (
        [f"0 {name}", f"1 {name}", "2 boom"],
        boom,
    )
    _, error = ran([name], [], has_one_exchange=True)
    assert f"0: {name}, 1: the end of the function" in str(error)
    _, error = ran([name, "x"], [name, "x"], has_one_exchange=True)
    assert "calls `x` after `optimizer.apply`, and earlier ones did not" in str(error)
