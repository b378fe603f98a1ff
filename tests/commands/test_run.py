"""`keras-strategy run` with real workers; the scripts import nothing heavy."""

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from tests.commands.scripts import ROOT, Script, finish, start
from tests.processes import wait_for_pids, wait_until, wait_until_gone

WAIT = """
tell("pids", os.getpid())
time.sleep(300)
"""


def test_output_lines_name_their_worker(tmp_path):
    script = Script(
        tmp_path,
        """
print("first")
print("to stderr", file=sys.stderr)
print("50 %\\r100 %")
print("no end", end="")
""",
    )
    done = script.run("--workers", "2")
    assert done.returncode == 0
    for rank in range(2):
        mine = [x for x in done.stdout.splitlines() if x.startswith(f"worker {rank}")]
        assert mine == [
            f"worker {rank} | first",
            f"worker {rank} | 50 %",
            f"worker {rank} | 100 %",
            f"worker {rank} | no end",
        ]
    assert sorted(done.stderr.splitlines()) == [
        "worker 0 | to stderr",
        "worker 1 | to stderr",
    ]


ENVIRONMENT = """
names = "KERAS_STRATEGY_PORT", "NPROC", "KERAS_STRATEGY_LOGICAL_CPUS"
tell("told", json.dumps([config, *map(os.environ.get, names), sys.argv[1:]]))
"""


GPUS = "GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--workers", "2"], ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        (["--workers", "6"], [",".join(GPUS)] * 6),
        (["--workers", "auto", "--gpus-per-worker", "1"], [*GPUS]),
        (["--workers", "2", "--gpus-per-worker", "0"], ["", ""]),
    ],
)
def test_workers_divide_gpus(tmp_path, monkeypatch, options, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
    script = Script(tmp_path, 'print("sees", os.environ["CUDA_VISIBLE_DEVICES"])')
    done = script.run(*options)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"worker {rank} | sees {gpus}" for rank, gpus in enumerate(expected)
    ]


def test_too_few_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    script = Script(tmp_path, "")
    done = script.run("--workers", "2", "--gpus-per-worker", "1")
    assert done.returncode == 2 and "gpus_per_worker=1" in done.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = script.run("--workers", "auto")
    assert done.returncode == 2 and "workers='auto' with 0 GPUs" in done.stderr


def test_worker_environment_and_arguments(tmp_path, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    script = Script(tmp_path, ENVIRONMENT)
    arguments = ["--workers", "7", "-m", "--", "file"]
    done = script.run(
        "--workers", "2", "--devices-per-worker", "3", arguments=arguments
    )
    assert done.returncode == 0, done.stderr
    told = script.told("told", 2)
    cluster = told[0][0]["cluster"]
    ports = {int(address.split(":")[1]) for address in cluster["worker"]}
    for rank, (config, hub_port, nproc, devices, given) in enumerate(told):
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["cluster"] == cluster
        assert hub_port == told[0][1]
        assert int(nproc) >= 8
        assert devices == "3"
        assert given == arguments
    assert len({*ports, int(told[0][1])}) == 3


@pytest.mark.full
def test_environment_sets_devices_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_STRATEGY_LOGICAL_CPUS", "5")
    monkeypatch.setenv("NPROC", "11")
    script = Script(tmp_path, ENVIRONMENT)
    assert script.run("--workers", "1").returncode == 0
    assert script.told("told", 1)[0][2:4] == ["11", "5"]


def test_workers_share_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = 'tell("told", json.dumps(os.environ.get("OMP_NUM_THREADS")))'
    script = Script(tmp_path, text)
    workers = len(os.sched_getaffinity(0))
    for number, threads in (("1", None), ("2", max(1, workers // 2))):
        assert script.run("--workers", number).returncode == 0
        told = script.told("told", int(number))
        assert told == [str(threads) if threads else None] * int(number)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert script.run("--workers", "2").returncode == 0
    assert script.told("told", 2) == ["3", "3"]


def test_run_accepts_module(tmp_path):
    data = tmp_path / "data.json"
    data.write_text('{"a": 1}')
    run = ["run", "--workers", "1", "-m", "json.tool", "--compact", str(data)]
    done = finish(start(*run))
    assert (done.returncode, done.stdout) == (0, 'worker 0 | {"a":1}\n')


def test_fingerprint_of_program_without_fit(tmp_path):
    report = tmp_path / "report.json"
    report.write_text("of another run")
    run = ["run", "--workers", "1", "--fingerprint", str(report), "-m", "this"]
    done = finish(start(*run))
    assert done.returncode == 1
    assert f"There is no fingerprint for {report}" in done.stderr
    assert not report.exists()


def test_failing_worker_ends_others_and_prints_last(tmp_path):
    script = Script(
        tmp_path,
        """
tell("pids", os.getpid())
if rank != 1:
    print("waits")
    time.sleep(300)
while len(list(folder.glob("pids?"))) < 3:
    time.sleep(0.01)
print("a line before")
raise KeyError("the reason")
""",
    )
    done = script.run("--workers", "3")
    assert done.returncode == 1
    wait_until_gone(*wait_for_pids(tmp_path, 3))
    lines = done.stderr.splitlines()
    first = "keras-strategy: worker 1 ended with exit status 1. Its last output:"
    last = lines[lines.index(first) + 1 :]
    assert last[0] == "Traceback (most recent call last):"
    assert last[-1] == "KeyError: 'the reason'"
    assert not any(" | " in line for line in last)


@pytest.mark.parametrize(
    "end, code, words",
    [
        ("sys.exit(3)", 3, "ended with exit status 3. It wrote nothing."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL."),
    ],
)
def test_exit_code_is_forwarded(tmp_path, end, code, words):
    done = Script(tmp_path, f"if rank == 1: {end}").run("--workers", "2")
    assert done.returncode == code
    assert f"worker 1 {words}" in done.stderr


@pytest.mark.parametrize("wait", [0.5, 30], ids=["soon", "never"])
def test_exit_code_of_first_failure(tmp_path, wait):
    """Not of who ended before it, because of it."""
    end = f"""
if rank == 1:
    tell("there", 1)
    time.sleep({wait})
    sys.exit(3)
while not (folder / "there1").exists():
    time.sleep(0.01)
sys.exit(76)
"""
    done = Script(tmp_path, end).run("--workers", "2")
    assert done.returncode == (3 if wait < 1 else 76)


def test_ctrl_c_ends_workers(tmp_path):
    script = Script(tmp_path, "try:\n    " + WAIT.strip().replace("\n", "\n    "))
    script.path.write_text(script.path.read_text() + "\nfinally:\n    os._exit(1)")
    process = script.start("--workers", "2")
    wait_for_pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130


def test_last_lines_without_traceback(tmp_path):
    script = Script(tmp_path, "for i in range(100): print(i)\nsys.exit('bad')")
    lines = script.run("--workers", "1").stderr.splitlines()
    assert "81" in lines and "bad" in lines
    assert "0" not in lines


def test_stuck_worker_is_killed_after_grace_period(tmp_path):
    script = Script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda *_: tell("asked", 1))
tell("pids", os.getpid())
while rank == 1 and len(list(folder.glob("pids?"))) < 2:
    time.sleep(0.01)
while rank == 0:
    time.sleep(1)
sys.exit(4)
""",
    )
    done = script.run("--workers", "2", "--grace-seconds", "3")
    assert done.returncode == 4
    assert script.told("asked", 1) == [1]
    wait_until_gone(*wait_for_pids(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded(tmp_path, number):
    script = Script(
        tmp_path,
        """
def note(number, frame):
    tell("signal", int(number))
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
"""
        + WAIT,
    )
    # Under nohup the suite ignores SIGHUP, and so would what it starts.
    ignored = signal.signal(number, signal.default_int_handler)
    try:
        process = script.start("--workers", "2")
    finally:
        signal.signal(number, ignored)
    wait_for_pids(tmp_path, 2)
    process.send_signal(number)
    assert finish(process).returncode == 0
    assert script.told("signal", 2) == [number, number]


def test_no_restart_after_signal(tmp_path):
    script = Script(tmp_path, WAIT)
    process = script.start("--workers", "2", "--max-restarts", "3")
    pids = wait_for_pids(tmp_path, 2)
    process.terminate()
    done = finish(process)
    assert done.returncode == 128 + signal.SIGTERM
    assert "was killed by SIGTERM." in done.stderr
    assert "restart" not in done.stderr
    wait_until_gone(*pids)


def test_second_signal_kills_workers(tmp_path):
    script = Script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, lambda *_: tell("asked", 1))
tell("pids", os.getpid())
while True:
    time.sleep(1)
""",
    )
    process = script.start("--workers", "1", "--grace-seconds", "300")
    wait_for_pids(tmp_path, 1)
    process.terminate()
    wait_until((tmp_path / "asked0").exists)
    process.terminate()
    assert finish(process).returncode == 128 + signal.SIGKILL


def test_workers_end_with_launcher(tmp_path):
    ignore = "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    process = Script(tmp_path, ignore + WAIT).start("--workers", "2")
    pids = wait_for_pids(tmp_path, 2)
    process.kill()
    process.wait()
    wait_until_gone(*pids)
    finish(process)


def test_children_of_workers_end_with_launcher(tmp_path):
    child = """
import subprocess
tell("pids", subprocess.Popen(["sleep", "300"]).pid)
time.sleep(300)
"""
    process = Script(tmp_path, child).start("--workers", "2")
    pids = wait_for_pids(tmp_path, 2)
    process.kill()
    process.wait()
    wait_until_gone(*pids)
    finish(process)


def test_children_end_with_their_worker(tmp_path):
    script = Script(
        tmp_path,
        """
import subprocess
tell("pids", subprocess.Popen(["sleep", "300"]).pid)
""",
    )
    assert script.run("--workers", "2").returncode == 0
    wait_until_gone(*wait_for_pids(tmp_path, 2))


def test_closed_output_does_not_block(tmp_path):
    script = Script(
        tmp_path,
        """
tell("pids", os.getpid())
while True:
    print("line")
    time.sleep(0.01)
""",
    )
    process = script.start("--workers", "1")
    assert process.stdout is not None
    assert process.stdout.readline() == "worker 0 | line\n"
    process.stdout.close()
    try:
        assert process.wait(240) == 128 + signal.SIGPIPE
    finally:
        process.kill()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    wait_until_gone(*wait_for_pids(tmp_path, 1))


RESTART = """
attempts = folder / f"attempts{rank}"
seen = json.loads(attempts.read_text()) if attempts.exists() else []
seen.append([config["cluster"]["worker"], os.environ["KERAS_STRATEGY_PORT"]])
tell("attempts", json.dumps(seen))
if len(seen) == 1:
    while not all((folder / f"attempts{i}").exists() for i in range(2)):
        time.sleep(0.01)
    if rank == 1:
        sys.exit(6)
    time.sleep(300)
"""


def test_restart_uses_new_ports(tmp_path):
    script = Script(tmp_path, RESTART)
    done = script.run("--workers", "2", "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert (
        "worker 1 ended with exit status 6. All workers start again in 1 s "
        "(restart 1 of 2)." in done.stderr
    )
    first, second = script.told("attempts", 2)
    assert first == second and len(first) == 2
    (addresses, hub_port), (new_addresses, new_hub_port) = first
    assert not {*addresses, hub_port} & {*new_addresses, new_hub_port}


def test_restarts_are_limited(tmp_path):
    script = Script(tmp_path, "print('once'); sys.exit(9)")
    done = script.run("--workers", "1", "--max-restarts", "1")
    assert done.returncode == 9
    assert done.stdout == "worker 0 | once\n" * 2
    assert done.stderr.count("start again") == 1


# Ends with 75 when it is asked to, as trainings do that are backed up.
SAVES = """
def save(*_):
    tell("saved", 1)
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
tell("pids", os.getpid())
"""


def test_preempted_worker_is_restarted(tmp_path):
    script = Script(
        tmp_path,
        SAVES
        + """
if (folder / "attempts1").exists():
    sys.exit(0)
while len(list(folder.glob("pids?"))) < 2:
    time.sleep(0.01)
if rank == 1:
    tell("attempts", 1)
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(300)
""",
    )
    done = script.run("--workers", "2", "--max-restarts", "3")
    assert done.returncode == 0, done.stderr
    line = (
        "keras-strategy: worker 1 was preempted (exit status 75). All workers start "
        "again in 1 s (restart 1 of 3)."
    )
    assert done.stderr.splitlines() == [line]
    assert script.told("saved", 2) == [1, 1]


def test_preempted_job_is_not_restarted(tmp_path):
    script = Script(tmp_path, SAVES + "time.sleep(300)")
    process = script.start("--workers", "2", "--max-restarts", "3")
    wait_for_pids(tmp_path, 2)
    process.terminate()
    done = finish(process)
    assert done.returncode == 75
    assert script.told("saved", 2) == [1, 1]
    (line,) = done.stderr.splitlines()
    assert line.endswith("was preempted (exit status 75).")


def test_colours_only_on_terminal(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    script = Script(tmp_path, "print('text')")
    assert "\x1b" not in script.run("--workers", "1").stdout
    lines = []
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        ours, theirs = pty.openpty()
        process = script.start("--workers", "1", stdout=theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as terminal:
            lines.append(terminal.readline())
            assert finish(process).returncode == 0
    assert lines[0].startswith(b"\x1b[") and b"worker 0 | \x1b[0mtext" in lines[0]
    assert lines[1] == b"worker 0 | text\r\n"


def test_launcher_does_not_import_keras(tmp_path):
    script = Script(tmp_path, "tell('modules', json.dumps(sorted(sys.modules)))")
    code = (
        "import json, sys\n"
        "from keras_strategy.commands.cli import main\n"
        "assert main() == 0\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = finish(
        start("run", "--workers", "1", str(script.path), program=["-c", code])
    )
    assert done.returncode == 0, done.stderr
    parent = set(json.loads(done.stderr))
    assert "keras_strategy.commands.launcher" in parent
    heavy = {"keras", "numpy", "jax", "torch", "tensorflow"}
    assert not heavy & (parent | set(script.told("modules", 1)[0]))


def test_workers_in_network_namespace(tmp_path):
    """The recipe of the page on the threat model."""
    inside = ["unshare", "--user", "--map-root-user", "--net"]
    loopback = "ip link set lo up"
    if subprocess.run([*inside, "sh", "-c", loopback], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    # As TensorFlow's servers do, they listen on all interfaces.
    script = Script(
        tmp_path,
        """
import socket
ports = [int(a.rpartition(":")[2]) for a in config["cluster"]["worker"]]
server = socket.create_server(("", ports[rank]))
tell("pids", ports[rank])
while len(list(folder.glob("pids?"))) < 2:
    time.sleep(0.01)
socket.create_connection(("127.0.0.1", ports[1 - rank])).close()
tell("reached", 1)
while not (folder / "tried").exists():
    time.sleep(0.01)
""",
    )
    run = [sys.executable, "-m", "keras_strategy", "run", "--workers", "2", script.path]
    quoted = " ".join(map(shlex.quote, map(str, run)))
    process = subprocess.Popen(
        [*inside, "sh", "-c", f"{loopback} && exec {quoted}"], cwd=ROOT
    )
    try:
        wait_until((tmp_path / "reached0").exists)
        wait_until((tmp_path / "reached1").exists)
        for port in script.told("pids", 2):
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0
        (tmp_path / "tried").touch()
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
