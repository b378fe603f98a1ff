"""Whatever becomes of a worker, all others end soon and say why. Real processes."""

import signal
import time

import pytest

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED
from tests.cluster.conftest import SOON

WAIT = """
import time
with client.track_operation("all_reduce in step 12"):
    print("there", flush=True)
    time.sleep(300)
"""
# A worker that has been in one operation, and now is on its own.
BUSY = "import time; client.exchange('start'); time.sleep(300)"
WAIT_AFTER = "client.exchange('start')\n" + WAIT
THREE = ["chief", "worker 0", "worker 1"]


@pytest.mark.parametrize("victim", [0, 2], ids=["chief", "worker"])
def test_killed_worker_ends_the_others(processes, victim):
    scripts = [WAIT_AFTER] * 3
    scripts[victim] = BUSY
    processes.start(scripts)
    others = [rank for rank in range(3) if rank != victim]
    processes.reached("there", *others)
    processes.signal(victim, signal.SIGKILL)
    for rank, (status, errors) in zip(others, processes.end(*others), strict=True):
        assert status == EXIT_OTHER_WORKER_FAILED
        assert f"{THREE[victim]} disconnected without notice" in errors
        assert f"{THREE[rank]} was in `all_reduce in step 12`" in errors


@pytest.mark.parametrize("victim", [0, 2], ids=["chief", "worker"])
def test_raising_worker_ends_the_others(processes, victim):
    scripts = [WAIT_AFTER] * 3
    scripts[victim] = (
        "client.exchange('start')\n"
        "with client.track_operation('all_reduce in step 12'):\n"
        "    raise ValueError('no such row\\nin this table')"
    )
    processes.start(scripts)
    for rank, (status, errors) in enumerate(processes.end(0, 1, 2)):
        assert status == (1 if rank == victim else EXIT_OTHER_WORKER_FAILED)
        assert "Traceback" in errors and '"script.py", line 3' in errors
        if rank != victim:
            assert (
                f"{THREE[rank]} ends. {THREE[victim]} raised ValueError: no such row "
                "(in or after `all_reduce in step 12`)\nin this table"
            ) in errors


@pytest.mark.parametrize("victim", [0, 2], ids=["chief", "worker"])
def test_hanging_worker_ends_the_others(processes, victim):
    scripts = [WAIT_AFTER] * 3
    scripts[1] = "client.exchange('start'); client.exchange('all_reduce in step 12')"
    scripts[victim] = BUSY
    processes.start(scripts, timeout=2)
    for status, errors in processes.end(0, 1, 2):
        assert status == EXIT_OTHER_WORKER_FAILED
        assert (
            f"{THREE[victim]} did not reach `all_reduce in step 12` within 2 s; it is "
            "in no operation; its main thread is in: <module> (script.py, line 1"
        ) in errors
        assert f"Main thread of {THREE[victim]}" in errors


def test_stopped_worker_ends_the_others(processes):
    processes.start([WAIT_AFTER, BUSY], timeout=1)
    processes.reached("there", 0)
    processes.signal(1, signal.SIGSTOP)
    ((status, errors),) = processes.end(0)
    assert status == EXIT_OTHER_WORKER_FAILED
    assert "worker 0 did not reach `all_reduce in step 12` within 1 s" in errors
    assert "does not answer" in errors
    processes.signal(1, signal.SIGCONT)
    assert processes.end(1)[0][0] == EXIT_OTHER_WORKER_FAILED


def test_nested_operation_does_not_hide_a_hang(processes):
    within = """
import time
with client.track_operation("step 12"):
    client.exchange("the next batch")
    time.sleep(300)
"""
    other = "import time; client.exchange('the next batch'); time.sleep(300)"
    processes.start([within, other], timeout=2)
    for status, errors in processes.end(0, 1):
        assert status == EXIT_OTHER_WORKER_FAILED
        assert "worker 0 did not reach `step 12` within 2 s; it is in no oper" in errors


def test_stopped_chief_ends_the_others(processes):
    processes.start([BUSY, WAIT_AFTER], timeout=1)
    processes.reached("there", 1)
    processes.signal(0, signal.SIGSTOP)
    ((status, errors),) = processes.end(1)
    assert status == EXIT_OTHER_WORKER_FAILED
    assert "chief does not answer" in errors and "`all_reduce in step 12`" in errors


def test_stopped_job_continues(processes):
    """As by Ctrl-Z: while all are stopped, nobody keeps anybody waiting."""
    slow = """
import time
with client.track_operation("all_reduce in step 12"):
    print("there", flush=True)
    for _ in range(8):
        time.sleep(0.1)
client.exchange("end")
"""
    processes.start([slow, slow], timeout=3)
    processes.reached("there", 0, 1)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            processes.signal(rank, number)
        if number == signal.SIGSTOP:
            time.sleep(4)
    assert processes.end(0, 1) == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("victim", "script"),
    [(0, "pass"), (2, "import sys; sys.exit(3)")],
    ids=["chief", "worker"],
)
def test_leaving_worker_ends_waiting_workers(processes, victim, script):
    scripts = [WAIT_AFTER] * 3
    scripts[victim] = "client.exchange('start')\n" + script
    processes.start(scripts)
    others = [rank for rank in range(3) if rank != victim]
    for status, errors in processes.end(*others):
        assert status == EXIT_OTHER_WORKER_FAILED
        assert f"{THREE[victim]} ended while " in errors
        assert "was waiting for it in `all_reduce in step 12`" in errors
    ((status, errors),) = processes.end(victim)
    assert (status, errors) == (3 if "exit" in script else 0, "")


def test_finished_workers_exit_cleanly(processes):
    script = "client.exchange('start')\nimport time\n"
    processes.start([script, script + "time.sleep(1)\nprint('done')"])
    assert processes.end(0, 1) == [(0, ""), (0, "")]


def test_fork_does_not_hide_death_of_worker(processes):
    fork = """
import os, sys, time
if os.fork() == 0:
    os.close(1), os.close(2)  # The test reads them until all have closed them.
    sys.stdin.read()  # Until the test is over.
    os._exit(0)
client.exchange("start")
time.sleep(300)
"""
    processes.start([WAIT_AFTER, fork])
    processes.reached("there", 0)
    processes.signal(1, signal.SIGKILL)
    ((status, errors),) = processes.end(0)
    assert (
        status == EXIT_OTHER_WORKER_FAILED
        and "worker 0 disconnected without notice" in errors
    )


def test_spawn_without_main_guard_is_named(processes):
    spawn = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
client.exchange("after")
"""
    processes.start([spawn, spawn])
    for rank, (status, errors) in enumerate(processes.end(0, 1)):
        assert status == 0
        name = ("chief", "worker 0")[rank]
        assert f"has already joined as {name}. If `multiprocessing`" in errors
        assert 'under `if __name__ == "__main__":`' in errors


def test_missing_file_of_worker_is_explained(processes):
    script = "client.exchange('start'); open('/no such file')"
    processes.start([WAIT_AFTER, script])
    (_, chief), (_, worker) = processes.end(0, 1)
    for errors in (chief, worker):
        assert "FileNotFoundError" in errors
        assert "Only the chief writes files" in errors


def test_missing_file_of_chief_is_not_explained(processes):
    processes.start(["open('/no such file')", WAIT_AFTER])
    for _, errors in processes.end(0, 1):
        assert "FileNotFoundError" in errors
        assert "Only the chief writes files" not in errors


def test_failed_fork_does_not_end_worker(processes):
    fork = """
import os
if os.fork() == 0:
    raise ValueError("in the fork")
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 1
client.exchange("after")
"""
    processes.start([fork, fork])
    for status, errors in processes.end(0, 1):
        assert status == 0
        assert errors.endswith("ValueError: in the fork\n")
        assert "ends." not in errors


def test_unowned_process_is_not_ended(processes):
    waits = """
from keras_strategy.errors import WorkerFailedError
try:
    with client.track_operation("all_reduce in step 12"):
        print("there", flush=True)
        assert client.failed.wait(30)
except WorkerFailedError as error:
    assert "worker 0 disconnected without notice" in str(error)
    assert "chief was in `all_reduce in step 12`" in str(error)
    raise SystemExit(5)
"""
    processes.start(
        [waits, BUSY.replace("client.exchange('start');", "")], exit_process=False
    )
    processes.reached("there", 0)
    processes.signal(1, signal.SIGKILL)
    assert processes.end(0) == [(5, "")]


def test_backend_error_does_not_hide_failure(processes):
    engine = """
client.exchange("start")
with client.track_operation("all_reduce in step 12"):
    raise RuntimeError("Connection closed by peer")
"""
    dies = (
        "import os\nclient.exchange('start')\nimport time; time.sleep(3); os._exit(9)"
    )
    processes.start([engine, dies])
    ((status, errors),) = processes.end(0)
    assert status == EXIT_OTHER_WORKER_FAILED
    assert "worker 0 disconnected without notice" in errors


LEAVES = """
import time
from keras_strategy.errors import WorkerFailedError
print("there", flush=True)
client.failed.wait(30)
try:
    client.exchange("step 13")
except WorkerFailedError:
    time.sleep(12)  # longer than a stuck worker may take
    raise SystemExit(5)
"""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("script", "status"), [(WAIT, EXIT_OTHER_WORKER_FAILED), (LEAVES, 5)]
)
def test_elastic_worker_ends_only_if_it_is_stuck(processes, script, status):
    processes.start([script, BUSY], is_elastic=True)
    processes.reached("there", 0)
    processes.signal(1, signal.SIGKILL)
    ((ended, _),) = processes.end(0)
    assert ended == status


def test_exception_in_unowned_process(processes):
    raises = """
import atexit, sys
hook = sys.excepthook
def mine(*arguments):
    print("mine", file=sys.stderr)
    hook(*arguments)
sys.excepthook = mine
atexit.register(lambda: print("ended in its own way", file=sys.stderr))
client.exchange("start")
raise ValueError("no such row")
"""
    hears = WAIT_AFTER.replace("time.sleep(300)", "client.failed.wait(30)")
    processes.start([hears, raises], exit_process=False)
    (chief, told), (worker, said) = processes.end(0, 1)
    assert chief == worker == 1
    assert "WorkerFailedError: worker 0 raised ValueError: no such row" in told
    assert said.startswith("mine\nTraceback")
    assert said.endswith("ValueError: no such row\nended in its own way\n")


def test_full_pipe_does_not_block_exit(processes):
    """Whoever reads the output of a worker may have stopped to do so."""
    writes = """
import sys
client.exchange("start")
print("there", flush=True)
with client.track_operation("all_reduce in step 12"):
    while True:
        print("x" * 1000, file=sys.stderr)
"""
    processes.start([writes, BUSY])
    processes.reached("there", 0)
    processes.signal(1, signal.SIGKILL)
    assert processes.workers[0].wait(SOON) == EXIT_OTHER_WORKER_FAILED


def test_handled_exception_ends_nothing(processes):
    """C code prints one by `sys.excepthook`, in a callback or a destructor."""
    prints = """
import sys, threading
def handled():
    try:
        raise ValueError("dealt with")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
handled()
thread = threading.Thread(target=handled)
thread.start()
thread.join()
client.exchange("after")
print("there", flush=True)
"""
    processes.start([prints, "client.exchange('after')"])
    (chief, told), other = processes.end(0, 1)
    assert (chief, other) == (0, (0, ""))
    assert told.count("ValueError: dealt with") == 2


def test_operation_has_its_own_timeout(processes):
    """A chief that writes for long is at work."""
    waits = "client.exchange('save', None, 60)"
    writes = "import time; time.sleep(3)\n" + waits
    processes.start([writes, waits], timeout=1)
    assert processes.end(0, 1) == [(0, ""), (0, "")]
