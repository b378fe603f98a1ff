"""Forked workers; that they do what fresh ones do is in test_worker_runner.py."""

import json
import os
import re
import signal

import pytest

from keras_strategy.testing import WorkerRunner
from tests.processes import runs, wait_until_gone
from tests.testing import functions
from tests.testing.warm_starter import WarmStarter


@pytest.fixture(scope="module")
def starter():
    # No engine: what is tested here is how programs start and end.
    with WarmStarter(modules=("json", "numpy")) as starter:
        yield starter


def ran(starter, script, text, *arguments, environment=None):
    """How a script of one worker ended."""
    script.write_text(text)
    with WorkerRunner(1, environment=environment, starter=starter) as runner:
        runner.start(script, *arguments)
        (end,) = runner.wait()
    return end


def test_modules_are_imported_before_the_program(starter, tmp_path):
    script, text = tmp_path / "script.py", "import sys; print('numpy' in sys.modules)"
    assert ran(starter, script, text).output == "True\n"
    assert ran(None, script, text).output == "False\n"


SCRIPT = """
import atexit, json, os, pathlib, signal, subprocess, sys, beside
# Not `os.popen`, whose pipe stays open for as long as nobody waits for the shell.
echo = subprocess.run("echo $MINE", shell=True, capture_output=True, text=True)
print(json.dumps({
    "arguments": sys.argv,
    "name": __name__,
    "main": sys.modules["__main__"].__file__,
    "beside": beside.value,
    "folder": os.getcwd(),
    "mine": os.environ.get("MINE"),
    "gone": os.environ.get("GONE"),
    "environment_of_c": echo.stdout.strip(),
    "group": os.getpgid(0) == os.getpid(),
    "stdin": sys.stdin.read(),
    "open": sorted(os.listdir("/proc/self/fd")),
    "signals": [str(signal.getsignal(s)) for s in (2, 13, 15, 17)],
}))
atexit.register(print, "at exit")
sys.excepthook = lambda *about: print("hook", about[1])
raise ValueError("why")
"""


def test_program_behaves_as_in_a_new_process(starter, tmp_path, monkeypatch):
    monkeypatch.setenv("GONE", "x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("value = 7")
    environment = {"MINE": "y", "GONE": None}
    told = []
    for each in (starter, None):
        end = ran(each, tmp_path / "script.py", SCRIPT, 1, environment=environment)
        assert end.exit_status == 1
        first, *rest = end.output.splitlines()
        assert rest == ["hook why", "at exit"]
        told.append(json.loads(first))
    warm, cold = told
    assert warm["mine"] == warm["environment_of_c"] == "y" and warm["gone"] is None
    assert warm == cold


def test_programs_draw_different_numbers(starter, tmp_path):
    script = tmp_path / "script.py"
    text = "import random, numpy; print(random.random(), numpy.random.rand())"
    drawn = [ran(starter, script, text).output.split() for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_variables_read_at_import_need_a_new_interpreter(starter):
    def warm(**environment):
        with WorkerRunner(1, environment=environment, starter=starter) as runner:
            return "numpy" in runner.run(functions.modules)[0]

    assert warm(MY_OWN="1", KERAS_STRATEGY_LOGICAL_CPUS="7", TF_CONFIG="{}")
    for name in ("XLA_FLAGS", "OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS"):
        assert not warm(**{name: "3"})
    assert not warm(PYTHONUNBUFFERED=None)


@pytest.mark.parametrize(
    "text, said",
    [
        ("raise ImportError('not here')", "ImportError: not here"),
        ("import sys; sys.modules['keras_strategy'] = sys", "imports keras_strategy"),
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "started threads",
        ),
    ],
    ids=["fails", "imports_keras_strategy", "starts_a_thread"],
)
def test_unshareable_modules_are_refused(tmp_path, monkeypatch, text, said):
    (tmp_path / "module_of_a_test.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (
        WarmStarter(modules=("module_of_a_test",)) as starter,
        WorkerRunner(1, starter=starter) as runner,
        pytest.raises(RuntimeError, match=re.escape(said)),
    ):
        runner.run(os.getpid)


def test_earlier_imports_are_kept(tmp_path, monkeypatch):
    """Which would copy all of it; what the program imports is, as always."""
    for name in ("before", "own"):
        (tmp_path / f"{name}_of_a_test.py").write_text(
            "import os\n"
            "class Says:\n"
            "    def __del__(self, write=os.write):\n"
            f"        write(1, b'{name}')\n"
            "says = Says()"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script, text = tmp_path / "script.py", "import before_of_a_test, own_of_a_test"
    with WarmStarter(modules=("before_of_a_test",)) as starter:
        assert ran(starter, script, text).output == "own"
    assert "before" in ran(None, script, text).output


def test_workers_end_with_their_starter(tmp_path):
    with WarmStarter(modules=("json",)) as starter:
        runner = WorkerRunner(2, starter=starter)
        runner.start(functions.ignore_all_signals, str(tmp_path))
        pids = [process.pid for process in runner.processes]
        assert all(map(runs, pids))
    wait_until_gone(*pids)
    assert [end.exit_status for end in runner.wait()] == [-signal.SIGKILL] * 2
    runner.close()
