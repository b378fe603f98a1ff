"""The threads that replicas run in, by themselves."""

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


def ran(*programs):
    """What replicas do, in the order in which they do it.

    Args:
        *programs: For each replica the names of the collectives that it makes; a
            name that is an exception is raised.
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
        ReplicaThreads(["a", "b", "c"]).call(
            turns, [replica(i) for i in range(len(programs))]
        )
    except Exception as raised:
        error = raised
    return seen, error


def test_replicas_take_turns_in_order():
    expected = ["0 x", "1 x", "2 x", [0, 1, 2], "0 ends", "1 ends", "2 ends"]
    assert ran(["x"], ["x"], ["x"]) == (expected, None)


def test_first_replica_runs_in_calling_thread():
    threads = []

    def call():
        threads.append(threading.current_thread())

    ReplicaThreads(["a", "b"]).call(TurnScheduler(2), [call, call])
    assert threads[0] is threading.current_thread() is not threads[1]


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
