"""WorkerRunner with real processes, fresh and forked; none of them needs Keras."""

import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest

import keras_strategy.testing
from keras_strategy.testing import WorkerFailed, WorkerRunner, WorkerTimeout
from tests.processes import wait_for_pids, wait_until, wait_until_gone
from tests.testing import functions
from tests.testing.warm_starter import WarmStarter


@pytest.fixture(scope="module", params=["cold", "warm"])
def starter(request):
    if request.param == "cold":
        yield None
        return
    with WarmStarter(modules=("json",)) as starter:
        yield starter


@pytest.fixture
def runner(starter):
    with WorkerRunner(workers=2, timeout_seconds=240, starter=starter) as runner:
        yield runner


def test_results_come_back_by_rank(runner):
    array = np.arange(6, dtype="float32").reshape(2, 3)
    results = runner.run(functions.nested, array, scale=2)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["scaled"][0], array * 2)
        assert result["scaled"][0].dtype == "float32"
        assert result["scaled"][1] == {"index": rank}
        assert result["text"] == "ü"
    assert len(results) == 2


def test_runner_calls_decorated_function(runner):
    assert runner.run(functions.decorated) == [3, 3]


def test_runner_reruns_on_new_ports(runner):
    first, _ = runner.run(os.getenv, "TF_CONFIG")
    second, _ = runner.run(os.getenv, "TF_CONFIG")
    assert json.loads(first)["cluster"] != json.loads(second)["cluster"]


def test_worker_environment(monkeypatch, starter):
    monkeypatch.setenv("NPROC", "8")
    monkeypatch.setenv("GONE", "here")
    names = (
        "TF_CONFIG",
        "KERAS_STRATEGY_PORT",
        "KERAS_STRATEGY_LOGICAL_CPUS",
        "NPROC",
        "KERAS_BACKEND",
        "MORE",
        "GONE",
    )
    extra = {"MORE": "x", "GONE": None}
    with WorkerRunner(
        3, devices_per_worker=2, environment=extra, starter=starter
    ) as runner:
        results = runner.run(functions.environment, *names)
    ports = set()
    for rank, result in enumerate(results):
        config = json.loads(result["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": rank}
        assert list(config["cluster"]) == ["worker"]
        for address in config["cluster"]["worker"]:
            host, port = address.split(":")
            assert host == "127.0.0.1"
            ports.add(int(port))
        ports.add(int(result["KERAS_STRATEGY_PORT"]))
        assert result["KERAS_STRATEGY_LOGICAL_CPUS"] == "2"
        assert result["NPROC"] == "8"
        assert result["KERAS_BACKEND"] == keras.backend.backend()
        assert (result["MORE"], result["GONE"]) == ("x", None)
    # Each worker's and the one that they share, the same in all of them.
    assert len(ports) == 4


def test_workers_fork_from_starter(runner, starter):
    parents = set(runner.run(os.getppid))
    assert (parents != {os.getpid()}) == (starter is not None)
    assert len(parents) == 1


def test_chief_is_first_worker(starter):
    with WorkerRunner(workers=3, chief=True, starter=starter) as runner:
        tasks = runner.run(functions.task)
        assert [process.name for process in runner.processes] == [
            "chief 0",
            "worker 0",
            "worker 1",
        ]
    assert tasks == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]


def test_worker_imports_only_needed_modules(runner):
    modules = runner.run(functions.modules)[0]
    assert not {"keras", "keras_strategy", "pytest"} & set(modules)


def test_exception_names_worker_and_traceback(runner):
    with pytest.raises(WorkerFailed) as caught:
        runner.run(functions.fail, 1)
    message = str(caught.value)
    assert message.startswith("worker 1 ended with exit status 1.")
    assert "worker 0 ended with exit status 0." in message
    assert "KeyError: 'the reason'" in message
    assert "in fail" in message
    assert caught.value.rank == 1
    assert [end.exit_status for end in caught.value.ends] == [0, 1]
    assert "this is printed first" in caught.value.ends[0].output


def test_failure_ends_before_timeout(starter):
    runner = WorkerRunner(workers=2, grace_seconds=0.2, starter=starter)
    with runner, pytest.raises(WorkerFailed) as caught:
        runner.run(functions.fail_while_others_wait, 0)
    assert caught.value.rank == 0
    assert not isinstance(caught.value, WorkerTimeout)
    assert caught.value.ends[1].exit_status == -signal.SIGKILL
    assert "worker 1 was killed by SIGKILL." in str(caught.value)


@pytest.mark.parametrize("status", [0, 7])
def test_worker_without_result_is_reported(runner, status):
    with pytest.raises(WorkerFailed, match=f"ended with exit status {status}"):
        runner.run(functions.leave_without_result, status)


def test_unpicklable_result_is_reported(runner):
    with pytest.raises(WorkerFailed, match="pickle"):
        runner.run(functions.unpicklable)


def test_timeout_dumps_stacks(tmp_path, starter):
    with WorkerRunner(workers=3, timeout_seconds=5, starter=starter) as runner:
        runner.start(functions.one_ends_and_others_are_stuck, str(tmp_path))
        pids = wait_for_pids(tmp_path, 3)
        wait_until(lambda: runner.processes[2].poll() == 0)
        # A stopped process cannot write its stack by itself.
        runner.kill(1, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout) as caught:
            runner.wait()
        assert [runner.output(rank) for rank in range(3)] == [
            end.output for end in caught.value.ends
        ]
    message = str(caught.value)
    assert "The time limit of 5 s passed with worker 0, worker 1." in message
    assert "worker 2 ended with exit status 0." in message
    for stuck in caught.value.ends[:2]:
        assert "in stuck_in_a_place_with_a_name" in stuck.output
        assert stuck.output in message
    wait_until_gone(*pids)


def test_run_times_out(tmp_path, starter):
    runner = WorkerRunner(workers=1, timeout_seconds=0.5, starter=starter)
    with runner, pytest.raises(WorkerTimeout, match="limit of 0.5 s passed with"):
        runner.run(functions.stuck_in_a_place_with_a_name, str(tmp_path))


def test_wait_returns_worker_ends(runner, tmp_path):
    runner.start(functions.own_child, str(tmp_path))
    pids = wait_for_pids(tmp_path, 2)
    assert [process.pid for process in runner.processes] == pids[::2]
    runner.kill(0)
    runner.kill(1, signal.SIGTERM)
    ends = runner.wait()
    assert [end.exit_status for end in ends] == [-signal.SIGKILL, -signal.SIGTERM]
    assert [end.name for end in ends] == ["worker 0", "worker 1"]
    assert all(0 < end.seconds < 240 for end in ends)
    wait_until_gone(*pids)


def test_exit_leaves_no_process(tmp_path, starter):
    with WorkerRunner(workers=2, starter=starter) as runner:
        runner.start(functions.own_child, str(tmp_path))
        pids = wait_for_pids(tmp_path, 2)
    assert len(pids) == 4
    wait_until_gone(*pids)
    assert runner.processes == ()


def test_orphaned_child_is_killed(runner):
    wait_until_gone(*runner.run(functions.child_left_behind))


def test_workers_end_with_their_runner(tmp_path):
    # The package is not imported from here: Keras would take seconds in the child.
    root = pathlib.Path(keras_strategy.testing.__file__).parents[2]
    code = f"""
import sys, types
sys.path.insert(0, {str(root)!r})
package = types.ModuleType("keras_strategy")
package.__path__ = [{str(root / "keras_strategy")!r}]
sys.modules["keras_strategy"] = package
from tests.testing.functions import start_runner_and_wait
start_runner_and_wait({str(tmp_path)!r})
"""
    # Its folder stays, since it is killed: let it be here.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        pids = wait_for_pids(tmp_path, 2)
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(*pids)


def test_port_in_use_is_retried(runner, tmp_path):
    for first, second in runner.run(functions.taken_the_first_time, str(tmp_path)):
        assert first != second


SCRIPT = """
import json, os, sys
print("arguments", sys.argv[1:])
print("task", json.loads(os.environ["TF_CONFIG"])["task"]["index"])
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_script_receives_arguments(runner, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runner.start(script, "--epochs", 3)
    ends = runner.wait()
    assert [end.exit_status for end in ends] == [3, 3]
    for rank, end in enumerate(ends):
        assert "arguments ['--epochs', '3']" in end.output
        assert f"task {rank}" in end.output
        assert "to stderr" in end.output
        assert runner.output(rank) == end.output


def test_bad_arguments_are_refused(runner, tmp_path):
    with pytest.raises(ValueError, match="workers=0"):
        WorkerRunner(workers=0)
    with pytest.raises(ValueError, match="devices_per_worker='2'"):
        WorkerRunner(devices_per_worker="2")  # pyright: ignore
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        WorkerRunner(timeout_seconds=0)
    lock = threading.Lock()
    with pytest.raises(ValueError, match="can be pickled"):
        runner.run(lambda: lock)
    with pytest.raises(FileNotFoundError, match="missing.py"):
        runner.start(tmp_path / "missing.py")
    with pytest.raises(ValueError, match="no keyword arguments"):
        runner.start(__file__, epochs=1)


def test_functions_without_a_module_are_sent(runner):
    word = "enclosed"
    assert runner.run(lambda: word) == [word, word]
    bound = functions.Decorated(functions.modules).__call__
    assert all("pickle" in modules for modules in runner.run(bound))


def test_each_worker_may_have_its_environment():
    with WorkerRunner(environment=[{"WORD": "first"}, {"WORD": "second"}]) as runner:
        assert runner.run(os.getenv, "WORD") == ["first", "second"]


@pytest.mark.full
def test_docstring_examples_run():
    texts = [inspect.cleandoc(x.__doc__ or "") for x in (WorkerRunner, WarmStarter)]
    examples = re.findall(r"```python\n(.*?)```", "\n".join(texts), re.DOTALL)
    assert len(examples) == 3
    for code in examples:
        exec(compile(code, "<example>", "exec"), {})
