"""`keras-strategy doctor --workers`, in real processes and on simulated machines."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED
from keras_strategy.commands.cli import main
from keras_strategy.commands.local_cluster import free_ports
from keras_strategy.commands.worker_checks import compare_clocks
from keras_strategy.options import CommunicationOptions
from tests.commands.scripts import ROOT, finish, start
from tests.distributed.machines import (
    Machine,
    simulated_machines,
    skip_without_namespaces,
)

# A worker that enters its machine, if it has one, before it runs the command.
WORKER = """
import json, sys
from keras_strategy.commands.cli import main
machine, *arguments = json.loads(sys.argv[1])
if machine:
    from tests.distributed.machines import Machine
    Machine(*machine).enter()
sys.exit(main(["doctor", "--workers", *arguments]))
"""
LOCAL = ["127.0.0.1", "127.0.0.1"]
COMMON = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}


def run_doctor(
    hosts: Sequence[str],
    machines: Sequence[Machine] = (),
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    seconds: float = 20,
    ranks: Sequence[int] = (0, 1),
) -> list[subprocess.CompletedProcess]:
    """Run the command in the workers `ranks` of the cluster at `hosts`."""
    ports = free_ports(len(hosts) + 1)
    workers = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    common = {**COMMON, "KERAS_STRATEGY_PORT": str(ports[-1])}
    processes = []
    for rank in ranks:
        task = {"type": "worker", "index": rank}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        variables = {**common, "TF_CONFIG": config, **environments[rank]}
        options = [machines[rank] if machines else None, f"--timeout-seconds={seconds}"]
        path = os.pathsep.join(
            filter(None, [variables.pop("PYTHONPATH", ""), str(ROOT)])
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, json.dumps(options)],
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return [finish(process) for process in processes]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_healthy_workers(backend):
    chief, other = run_doctor(LOCAL, environments=[{"KERAS_BACKEND": backend}] * 2)
    assert chief.returncode == other.returncode == 0, chief.stdout + chief.stderr
    assert other.stdout == "" and "FAIL" not in chief.stdout
    for check in ("worker 0", "worker 1", "names", "versions", "ports", "clocks"):
        assert f"OK    {check}: " in chief.stdout
    assert "reached at 127.0.0.1" in chief.stdout


def test_workers_that_differ(tmp_path):
    """In versions, variables and threads; the secret is not shown."""
    (tmp_path / "keras-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: keras\nVersion: 9.9\n"
    (tmp_path / "keras-9.9.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "keras-9.9.dist-info" / "top_level.txt").write_text("keras\n")
    secret = {"KERAS_STRATEGY_SECRET": "hidden"}
    threads = {"OMP_NUM_THREADS": "1000"}
    chief, other = run_doctor(
        LOCAL,
        environments=[
            {**secret, **threads, "KERAS_BACKEND": "jax"},
            {**secret, "JAX_ENABLE_X64": "1", "PYTHONPATH": str(tmp_path)},
        ],
    )
    assert chief.returncode == other.returncode == 1
    lines = chief.stdout.splitlines()
    assert any(
        line.startswith("FAIL  versions: Keras (worker 0: 3.")
        and line.endswith("; worker 1: 9.9)")
        for line in lines
    )
    assert any(
        line.startswith("FAIL  versions: backend (worker 0: jax 0.") for line in lines
    )
    line = "FAIL  variables: JAX_ENABLE_X64 (worker 0: not set; worker 1: 1)"
    assert lines[lines.index(line) + 1].strip().startswith("Fix: set the variable")
    assert any(line.startswith("FAIL  threads: 2 workers at 127.0.") for line in lines)
    assert "hidden" not in chief.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_worker(rank):
    (only,) = run_doctor(LOCAL, seconds=2, ranks=[rank])
    assert only.returncode == 1
    assert f"worker {1 - rank} has not arrived within 2 s" in only.stdout
    assert "Fix: start this command in all 2 workers" in only.stdout
    assert "127.0.0.1 must stand for an address of worker 0's machine" in only.stdout


def test_unknown_interface():
    unknown = {"KERAS_STRATEGY_INTERFACE": "eth7"}
    chief, other = run_doctor(LOCAL, environments=[{}, unknown])
    assert (chief.returncode, other.returncode) == (EXIT_OTHER_WORKER_FAILED, 1)
    assert "worker 1 ended while worker 0 was waiting for it" in chief.stderr
    assert "Received: 'eth7'\n      Fix: correct what the message names" in other.stdout


def test_command_without_cluster(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["doctor", "--workers"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  cluster: none was found" in out and "torchrun: no, RANK" in out
    assert "with srun, mpirun, torchrun or keras-strategy run" in out


@pytest.mark.parametrize("jobs", [{"worker": ["127.0.0.1:2222"]}, {"worker": [7]}])
def test_command_with_one_worker_or_invalid_cluster(jobs, capsys, monkeypatch):
    config = {"cluster": jobs, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    invalid = jobs["worker"] == [7]
    assert main(["doctor", "--workers"]) == invalid
    out = capsys.readouterr().out
    assert ("correct what" if invalid else "this process trains alone") in out


def test_launcher_starts_the_command():
    command = ["-m", "keras_strategy", "doctor", "--workers"]
    done = finish(start("run", "--workers", "2", *command))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 0 | OK    clocks" in done.stdout


def test_clocks_are_compared_with_the_chiefs():
    names, options = ("worker 0", "worker 1"), CommunicationOptions()
    cluster = Cluster(0, names, ("a:1", "b:1"), None, options)  # pyright: ignore
    # The first reply was late.
    finding = compare_clocks(cluster, [[10.0, 12.0], [11.0, 11.25]])
    assert finding.ok and finding.detail == "at most 0.250 s from the chief's"
    finding = compare_clocks(cluster, [[10.0, 5.0], [11.0, 6.0]])
    assert not finding.ok and "worker 0: +0.0 s; worker 1: -5.0 s" in finding.detail


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("own_name", ["127.0.1.1", "10.77.0.9", None])
def test_name_of_a_machine(own_name):
    """Its own may stand for the loopback, as on Debian, and for no other address."""
    skip_without_namespaces()
    with simulated_machines(2, own_name=own_name) as machines:
        chief, other = run_doctor(["10.77.0.1", "node2"], machines)
    is_right = own_name == "127.0.1.1"
    assert chief.returncode == other.returncode == (not is_right), chief.stdout
    values = f"worker 0: 10.77.0.2; worker 1: {own_name or 'no address'}"
    assert (f"FAIL  names: node2 ({values})" in chief.stdout) == (not is_right)
    assert "OK    worker 1: node2 (" in chief.stdout
    assert "reached at 10.77.0.2 (eth0)" in chief.stdout
    assert "ports that the system chooses" in chief.stdout


def test_chiefs_name_on_the_wrong_interface():
    skip_without_namespaces()
    with simulated_machines(2, wrong_interface=True) as machines:
        chief, other = run_doctor(["node1", "node2"], machines, seconds=3)
    assert chief.returncode == other.returncode == 1
    assert "worker 1 has not arrived within 3 s" in chief.stdout
    assert "it stands for 10.88.1.1" in chief.stdout
    assert "worker 1 cannot reach it at node1:" in other.stdout
    assert "Here, on node2 with " in other.stdout
    assert "10.77.0.2 (eth0)" in other.stdout
    assert "it stands for 10.77.0.1" in other.stdout


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_blocked_connection(backend):
    skip_without_namespaces()
    with simulated_machines(3, blocked=[(2, 1)]) as machines:
        hosts = [machine.address for machine in machines]
        environments = [{"KERAS_BACKEND": backend}] * 3
        ends = run_doctor(hosts, machines, environments, ranks=range(3))
    assert [end.returncode for end in ends] == [1, 1, 1]
    out = ends[0].stdout
    assert "FAIL  ports: worker 1, at 10.77.0.2, cannot connect to worker 2" in out
    assert "If a firewall blocks these ports, open them." in out
    assert "OK    clocks: " in out
