"""The processes of both sides of a comparison, and whose turn it is."""

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks.comparisons import Comparison
from benchmarks.paired_timing import CPU, WALL
from keras_strategy.commands.local_cluster import LocalCluster, free_ports
from keras_strategy.commands.processes import Process
from keras_strategy.testing.worker_runner import base_environment
from tests.testing.warm_starter import WarmStarter


class Starter(Protocol):
    """Protocol of starters of scripts, warm or cold."""

    @property
    def start(self) -> Callable[..., Process]:
        """Start a script, as `WarmStarter.start` does."""
        ...


_SCRIPT = str(Path(__file__).with_name("side.py"))
# To compile on a busy machine; who takes longer hangs.
_PATIENCE = 300.0
_END_SECONDS = 5.0


class Sided:
    """The processes of one side: all of them train together, and wait together.

    They start with this object; `ready` waits for their first step.

    Args:
        starter: What forks them.
        comparison: What they are for.
        ours: Which of its two programs they run.
        case: The name of the case.
        environments: More variables of each process, by rank.
    """

    def __init__(
        self,
        starter: Starter,
        comparison: Comparison,
        ours: bool,
        case: str,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> None:
        self.idle = 0.0  # seconds of processors while the others had their turn
        self.cpu = 0.0  # and of all that was done
        self.peak_mb = 0.0
        self.first_step = 0.0  # seconds
        self._processes = []
        self._connections: list[Connection] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        program = comparison.programs[0 if ours else 1]
        ours = ours or comparison.both_ours
        job = {
            "program": program,
            "ours": ours,
            "cases": comparison.catalog,
            "case": case,
            "devices": comparison.devices,
        }
        try:
            with tempfile.TemporaryDirectory() as folder:
                address = os.path.join(folder, "turns")
                with socket.create_server(address, family=socket.AF_UNIX) as server:
                    for rank, more in enumerate(_environments(comparison, ours)):
                        process = starter.start(
                            f"{'ours' if ours else 'peer'} {rank}",
                            _SCRIPT,
                            [address, json.dumps(job | {"rank": rank})],
                            {**base_environment(), **more, **environments[rank]},
                            self._log,
                            self._log,
                            imports_beside=False,
                        )
                        self._processes.append(process)
                    self._connections = self._connected(server)
            self._send("start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Sided":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ready(self) -> None:
        """Wait until the program exists and has trained for one step."""
        self.first_step = max(answer["seconds"] for answer in self._answers())

    def _connected(self, server: socket.socket) -> list[Connection]:
        server.settimeout(1.0)
        until = time.monotonic() + _PATIENCE
        by_rank = {}
        while len(by_rank) < len(self._processes):
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                self._check(until)
                continue
            connection = Connection(accepted.detach())
            by_rank[connection.recv()] = connection
        return [by_rank[rank] for rank in sorted(by_rank)]

    def train(self, steps: int) -> dict[str, float]:
        """Trains; returns the seconds it took by the unit of the speed."""
        answers = self.ask("train", steps)
        self.idle += sum(answer["idle"] for answer in answers)
        return {
            WALL: statistics.mean(answer[WALL] for answer in answers),
            CPU: sum(answer[CPU] for answer in answers),
        }

    def ask(self, *request: Any) -> list[Any]:
        """Lets all processes answer something at once."""
        self._send(*request)
        return self._answers()

    def _send(self, *request: Any) -> None:
        for connection in self._connections:
            connection.send(request)

    def _answers(self) -> list[Any]:
        until = time.monotonic() + _PATIENCE
        answers = []
        for connection in self._connections:
            while not connection.poll(1.0):
                self._check(until)
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionError):
                self._check(0.0)
            if "error" in answers[-1]:
                raise RuntimeError(answers[-1]["error"])
        self.cpu = sum(answer["cpu"] for answer in answers)
        self.peak_mb = sum(answer["peak_mb"] for answer in answers)
        return [answer["answer"] for answer in answers]

    def _check(self, until: float) -> None:
        """Raise if a process has ended or the time limit has passed."""
        time.sleep(0.1 if until == 0.0 else 0.0)  # its end comes after its last words
        ended = [p.name for p in self._processes if p.poll() is not None]
        if ended or time.monotonic() > until:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-4000:]
            how = f"ended: {ended}" if ended else "did not answer"
            raise RuntimeError(f"{self._processes[0].name} {how}. Output:\n{said}")

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            try:
                connection.send(("end",))
            except OSError:
                continue  # it has ended
        until = time.monotonic() + _END_SECONDS
        for process in self._processes:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            process.kill()
        for connection in self._connections:
            connection.close()
        self._log.close()


def _environments(comparison: Comparison, ours: bool) -> list[Mapping[str, str]]:
    """Return the environment of a side's processes, by rank.

    A peer finds what torchrun, and TensorFlow's own cluster, would tell it.
    """
    workers = comparison.workers
    logical = {"KERAS_STRATEGY_LOGICAL_CPUS": str(comparison.devices)} if ours else {}
    if workers == 1:
        return [logical]
    cluster = LocalCluster.on_free_ports(workers)
    if ours:
        return [cluster.variables(rank) | logical for rank in range(workers)]
    (port,) = free_ports(1)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {
            **shared,
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "GLOO_SOCKET_IFNAME": "lo",
            "TF_CONFIG": cluster.variables(rank)["TF_CONFIG"],
        }
        for rank in range(workers)
    ]


@contextmanager
def starter_for(backend: str, workers: int) -> Iterator[WarmStarter]:
    """Return a starter that forks processes which have imported the backend.

    Args:
        backend: The Keras backend.
        workers: How many processes a side has; they must not fight for the cores.
    """
    before = dict(os.environ)
    os.environ["KERAS_BACKEND"] = backend
    # XLA sizes the thread pool of its CPU devices by it, see the Makefile.
    os.environ.setdefault("NPROC", "8")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if workers > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    try:
        with WarmStarter(["keras", "sklearn.datasets"]) as starter:
            # Engines may set more, which must not differ for what is forked.
            yield starter
    finally:
        os.environ.clear()
        os.environ.update(before)
