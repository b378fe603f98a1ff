"""Processes of two programs that train in turn, and the row of a comparison."""

import contextlib
import dataclasses
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks import program_process
from benchmarks.comparisons import Comparison, Program
from benchmarks.paired_timing import CPU, WALL, OtherLoad, Pairing, compare, warm
from keras_strategy.commands.local_cluster import free_ports
from keras_strategy.testing import WorkerRunner
from tests.testing.warm_starter import WarmStarter

# A row is noisy if others took more than this share of the machine, or if the quartiles
# of its ratio in CPU time are farther apart.
MAX_OTHERS, MAX_SPREAD = 0.03, 0.08
# To compile on a busy machine; who takes longer hangs.
_TIMEOUT_SECONDS = 300.0


def torchrun_variables(
    rank: int, workers: int, address: str, port: int
) -> dict[str, str]:
    """Return the variables by which processes of torchrun find each other."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(workers)}
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **place}


class ProgramProcesses(contextlib.AbstractContextManager["ProgramProcesses"]):
    """Processes of one program: all of them train together, and wait together.

    They start with this object; `ready` waits for their first step. A starter forks
    processes that have imported the backend. `environments` are more variables of each
    process, by rank.
    """

    def __init__(
        self,
        program: Program,
        case: str,
        workers: int = 1,
        devices: int = 1,
        starter: WarmStarter | None = None,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> None:
        self.idle = 0.0  # CPU seconds while the others had their turn
        self.cpu = 0.0  # CPU seconds of everything
        self.peak_mb = 0.0
        self.first_step = 0.0  # seconds
        self._connections: list[Connection] = []
        variables: list[dict[str, str | None]] = [dict(e) for e in environments]
        if workers == 1:
            variables[0]["TF_CONFIG"] = None
        elif not program.is_ours:
            (port,) = free_ports(1)
            for rank in range(workers):
                variables[rank] |= torchrun_variables(rank, workers, "127.0.0.1", port)
                variables[rank]["GLOO_SOCKET_IFNAME"] = "lo"
        self._runner = WorkerRunner(
            *(workers, devices if program.is_ours else None, _TIMEOUT_SECONDS),
            environment=variables,
            starter=starter,
        )
        job = program.function, dict(program.options), program.is_ours, case, devices
        try:
            with tempfile.TemporaryDirectory() as folder:
                address = os.path.join(folder, "turns")
                with socket.create_server(address, family=socket.AF_UNIX) as server:
                    self._runner.start(program_process.serve, address, *job)
                    self._connect(server, workers)
            self._send("start")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        self._runner.close()
        for connection in self._connections:
            connection.close()

    def ready(self) -> None:
        """Wait until the program exists and has trained for one step."""
        self.first_step = max(self._answers())

    def train(self, steps: int) -> dict[str, float]:
        """Train, and return the seconds by the unit of the speed."""
        answers = self.ask("train", steps)
        self.idle += sum(answer["idle"] for answer in answers)
        return {
            WALL: statistics.mean(answer[WALL] for answer in answers),
            CPU: sum(answer[CPU] for answer in answers),
        }

    def ask(self, *request: Any) -> list[Any]:
        """Call a method in all processes at once, and return the results."""
        self._send(*request)
        return self._answers()

    def _connect(self, server: socket.socket, workers: int) -> None:
        server.settimeout(1.0)
        until = time.monotonic() + _TIMEOUT_SECONDS
        while len(self._connections) < workers:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                self._check(until)
            else:
                self._connections.append(Connection(accepted.detach()))

    def _send(self, *request: Any) -> None:
        for connection in self._connections:
            connection.send(request)

    def _answers(self) -> list[Any]:
        until = time.monotonic() + _TIMEOUT_SECONDS
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
        processes = enumerate(self._runner.processes)
        ended = [rank for rank, process in processes if process.poll() is not None]
        if ended or time.monotonic() > until:
            output = self._runner.output(ended[0] if ended else 0)[-4000:]
            how = "ended" if ended else "did not answer"
            raise RuntimeError(f"A program's process {how}. Output:\n{output}")


@contextlib.contextmanager
def starter_for(backend: str, workers: int) -> Iterator[WarmStarter]:
    """Context manager of a starter whose processes have imported a backend.

    Several workers of a side must not fight for the cores.
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
            # Backends may set more, which must not differ for what is forked.
            yield starter
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure_row(
    starter: WarmStarter,
    comparison: Comparison,
    case: str,
    rounds: int,
    seconds: float,
    starts: int = 1,
) -> dict[str, Any]:
    """Measure a comparison of one case, and return the row.

    In each of `starts` starts of the processes, each program is timed `rounds` times,
    for about `seconds`. One start can be some percent faster than the next, with the
    places that its memory got, and its own rounds do not show it. The `noise` of the
    row is up to 1 where the machine was quiet.
    """
    done = [_start(starter, comparison, case, rounds, seconds) for _ in range(starts)]
    pairing = Pairing(tuple(round for start in done for round in start.pairing.rounds))
    others = statistics.mean(start.others for start in done)
    low, high = pairing.speeds[CPU].spread
    return {
        "backend": comparison.backend,
        "case": f"{case}: {comparison.name}",
        "peer": comparison.peer,
        "aim": comparison.aim,
        "speeds": {u: dataclasses.asdict(s) for u, s in pairing.speeds.items()},
        "once_seconds": pairing.fixed_seconds,
        "first_step_seconds": _medians(start.first_steps for start in done),
        "peak_mb": _medians(start.peaks for start in done),
        "steps": done[-1].steps,
        "starts": starts,
        "others": others,
        # Of what both used, what a side used when it was not its turn.
        "idle": sum(start.idle for start in done) / sum(start.used for start in done),
        "load": os.getloadavg()[0],
        "noise": max(others / MAX_OTHERS, (high - low) / MAX_SPREAD),
    }


class _Start(NamedTuple):
    """Measurements between the start of both sides' processes and their end."""

    steps: int  # of a long turn
    pairing: Pairing
    used: float  # CPU seconds of both
    idle: float  # those out of their turns
    others: float  # the share of the machine that others used
    first_steps: tuple[float, float]  # seconds of ours and the peer's
    peaks: tuple[float, float]  # megabytes


def _start(
    starter: WarmStarter, comparison: Comparison, case: str, rounds: int, seconds: float
) -> _Start:
    """Start the processes of both sides, time them in turn, and end them."""
    with contextlib.ExitStack() as stack:
        sides: list[ProgramProcesses] = []
        for program in comparison.ours, comparison.theirs:
            size = comparison.workers, comparison.devices
            side = ProgramProcesses(program, case, *size, starter)
            sides.append(stack.enter_context(side))
            side.ready()  # each has the machine for its first step
        ours, peer = sides
        steps = warm(ours.train, peer.train, seconds, comparison.min_steps)
        load, used, idle = OtherLoad(), ours.cpu + peer.cpu, ours.idle + peer.idle
        pairing = compare(ours.train, peer.train, steps, rounds)
        used, idle = ours.cpu + peer.cpu - used, ours.idle + peer.idle - idle
        first_steps = ours.first_step, peer.first_step
        peaks = ours.peak_mb, peer.peak_mb
        return _Start(steps, pairing, used, idle, load.share(used), first_steps, peaks)


def _medians(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [statistics.median(side) for side in zip(*pairs, strict=True)]
