"""`keras-strategy run --min-workers` with real workers, without Keras."""

import signal
import time

import pytest

from tests.commands.scripts import Script, finish
from tests.processes import wait_for_pids

HEAD = """
import json, os, pathlib, signal, sys, time
from keras_strategy.cluster import elastic
from keras_strategy.errors import ClusterError
folder = pathlib.Path(__file__).parent
worker = elastic.elastic_worker()

def join():
    worker.wait_for_cluster()
    elastic.check_has_joined()
    config = json.loads(os.environ["TF_CONFIG"])
    cluster = config["cluster"]["worker"]
    ports = cluster if isinstance(cluster, list) else list(cluster.values())
    return config["task"]["index"], ports, cluster

def wait_until_it_ends():
    while not worker.must_leave:
        time.sleep(0.01)

def is_first(name):
    path = folder / name
    exists = path.exists()
    path.touch()
    return not exists
"""

GOES_ON = """
seen = []
while True:
    index, ports, cluster = join()
    seen.append([os.getpid(), len(ports), type(cluster).__name__, *ports])
    (folder / f"seen{index}").write_text(json.dumps(seen))
    if index == 1 and is_first("failed"):
        sys.exit(3)
    if index == 1 or len(seen) == 3:
        break
    wait_until_it_ends()
"""


def test_workers_go_on_without_a_failed_one_and_with_its_successor(tmp_path):
    script = Script(tmp_path, GOES_ON, HEAD)
    options = "--workers", "3", "--min-workers", "1", "--max-restarts", "1"
    done = script.run(*options)
    assert done.returncode == 0, done.stderr
    first, _, last = seen = script.told("seen", 3)
    for of_survivor in (first, last):
        pids, sizes, kinds, *_ = zip(*[entry[:3] for entry in of_survivor], strict=True)
        assert len(set(pids)) == 1
        assert sizes == (3, 2, 3)
        assert kinds == ("list", "dict", "list")  # there is no worker 1
    assert seen[1][0][1:] == first[2][1:]
    assert len({port for entry in first for port in entry[3:]}) == 8
    assert done.stderr.splitlines() == [
        "keras-strategy: 3 of 3 workers train: worker 0, worker 1, worker 2.",
        "keras-strategy: worker 1 ended with exit status 3. It starts again in 1 s "
        "(restart 1 of 1).",
        "keras-strategy: 2 of 3 workers train: worker 0, worker 2.",
        "keras-strategy: 3 of 3 workers train: worker 0, worker 1, worker 2.",
    ]


def test_training_fails_with_fewer_than_min_workers(tmp_path):
    script = Script(
        tmp_path,
        "index, *_ = join()\nif index == 1: sys.exit('why')\ntime.sleep(300)",
        HEAD,
    )
    done = script.run("--workers", "2", "--min-workers", "2")
    assert done.returncode == 1
    assert "worker 1 ended with exit status 1. It is not started again." in done.stderr
    assert done.stderr.splitlines()[-1] == "why"


@pytest.mark.parametrize(
    ("program", "workers", "runs"),
    [
        ("print('once'); sys.exit(9)", 2, 3),
        # Workers that all wait for each other end with 76 as well as their victims do.
        ("join(); print('once'); sys.exit(76)", 1, 2),
        ("print('once'); sys.exit(76)", 1, 2),
    ],
)
def test_restarts_are_limited(tmp_path, program, workers, runs):
    script = Script(tmp_path, program, HEAD)
    options = "--min-workers", "1", "--max-restarts", "1"
    done = script.run("--workers", str(workers), *options)
    assert f"sys.exit({done.returncode})" in program
    assert done.stdout.count("once") == runs


RESTARTS_TOGETHER = """
index, ports, _ = join()
print(len(ports))
if index == 1 and is_first("failed"):
    sys.exit(3)
if index != 1 and is_first(f"effect{index}"):
    wait_until_it_ends()
    sys.exit(76)
"""


def test_processes_that_connect_once_all_start_again(tmp_path):
    script = Script(tmp_path, RESTARTS_TOGETHER, HEAD)
    options = "--workers", "3", "--min-workers", "1", "--max-restarts", "1"
    done = script.run(*options)
    assert done.returncode == 0, done.stderr
    sizes = sorted(line.split(" | ")[1] for line in done.stdout.splitlines())
    assert sizes == ["3"] * 6


SLOW_CAUSE = """
index, ports, _ = join()
if index == 1:
    time.sleep(4)
    sys.exit(75)
if len(ports) == 2:
    sys.exit(76)
"""


def test_an_effect_waits_for_a_slow_cause(tmp_path):
    script = Script(tmp_path, SLOW_CAUSE, HEAD)
    done = script.run("--workers", "2", "--min-workers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "keras-strategy: worker 1 was preempted (exit status 75). It is not started "
        "again.",
        "keras-strategy: 1 of 2 workers train: worker 0.",
    ]


def test_worker_that_does_not_leave_is_killed(tmp_path):
    text = """
index, ports, _ = join()
print(f"{index} of {len(ports)}")
if index == 1 and is_first("failed"):
    sys.exit(3)
if index == 2 and is_first("stuck"):
    time.sleep(300)
if len(ports) == 3:
    wait_until_it_ends()
    join()
"""
    script = Script(tmp_path, text, HEAD)
    done = script.run("--workers", "3", "--min-workers", "1", "--grace-seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "worker 2 was killed by SIGKILL. It is not started again." in done.stderr
    assert "keras-strategy: 1 of 3 workers train: worker 0." in done.stderr


COMPLETE = """
if folder.joinpath("failed").exists():
    (folder / "again").touch()
    time.sleep(300)
index, ports, _ = join()
if index == 1:
    (folder / "failed").touch()
    sys.exit(3)
wait_until_it_ends()
assert len(join()[1]) == 1
while not (folder / "again").exists():
    time.sleep(0.01)
"""


def test_complete_training_does_not_wait_for_starting_workers(tmp_path):
    script = Script(tmp_path, COMPLETE, HEAD)
    options = "--workers", "2", "--min-workers", "1", "--max-restarts", "1"
    started = time.monotonic()
    done = script.run(*options)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 60


def test_signal_ends_all_workers(tmp_path):
    text = "index, *_ = join(); (folder / f'pids{index}').write_text(str(os.getpid()))"
    script = Script(tmp_path, f"{text}\ntime.sleep(300)", HEAD)
    process = script.start(
        "--workers", "2", "--min-workers", "1", "--max-restarts", "9"
    )
    wait_for_pids(tmp_path, 2)
    process.terminate()
    done = finish(process)
    assert done.returncode == 128 + signal.SIGTERM
    assert "starts again" not in done.stderr


def test_program_without_run_elastic_is_refused(tmp_path):
    text = """
try:
    elastic.check_has_joined()
except ClusterError as error:
    print(error)
"""
    script = Script(tmp_path, text, HEAD)
    done = script.run("--workers", "1", "--min-workers", "1")
    assert "pass this to `keras_strategy.run_elastic`" in done.stdout
    assert Script(tmp_path, text, HEAD).run("--workers", "1").stdout == ""
