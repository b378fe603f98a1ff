"""Processes of two programs that train in turn, and the row of a comparison."""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.comparisons import Comparison, Program
from benchmarks.paired_timing import CPU, WALL, OtherLoad, Pairing, compare, warm
from keras_strategy.commands.local_cluster import LocalCluster, free_ports
from keras_strategy.testing.warm_starter import WarmStarter, base_environment

# A row is noisy if others took more than this share of the machine, or if the quartiles
# of its ratio in CPU time are farther apart.
MAX_OTHERS, MAX_SPREAD = 0.03, 0.08
_SCRIPT = str(Path(__file__).with_name("program_process.py"))
# To compile on a busy machine; who takes longer hangs.
_TIMEOUT_SECONDS = 300.0
_END_SECONDS = 5.0


class ProgramProcesses:
    """Processes of one program: all of them train together, and wait together.

    They start with this object; `ready` waits for their first step.

    Args:
        start: Starts a script, as `WarmStarter.start` does.
        program: What they run.
        case: The name of the case.
        workers: Their number.
        devices: The devices of each.
        environments: More variables of each process, by rank.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        program: Program,
        case: str,
        workers: int = 1,
        devices: int = 1,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> None:
        self.idle = 0.0  # CPU seconds while the others had their turn
        self.cpu = 0.0  # CPU seconds of everything
        self.peak_mb = 0.0
        self.first_step = 0.0  # seconds
        self._processes = []
        self._connections: list[Connection] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        job = {
            "function": program.function,
            "options": dict(program.options),
            "is_ours": program.is_ours,
            "case": case,
            "devices": devices,
        }
        variables = _environments(program.is_ours, workers, devices)
        try:
            with tempfile.TemporaryDirectory() as folder:
                address = os.path.join(folder, "turns")
                with socket.create_server(address, family=socket.AF_UNIX) as server:
                    for rank, more in enumerate(variables):
                        process = start(
                            f"{program.function} {rank}",
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

    def __enter__(self) -> "ProgramProcesses":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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

    def _connected(self, server: socket.socket) -> list[Connection]:
        server.settimeout(1.0)
        until = time.monotonic() + _TIMEOUT_SECONDS
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
        ended = [p.name for p in self._processes if p.poll() is not None]
        if ended or time.monotonic() > until:
            self._log.seek(0)
            output = self._log.read().decode(errors="replace")[-4000:]
            how = f"ended: {ended}" if ended else "did not answer"
            raise RuntimeError(f"{self._processes[0].name} {how}. Output:\n{output}")

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.send(("end",))
        until = time.monotonic() + _END_SECONDS
        for process in self._processes:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            process.kill()
        for connection in self._connections:
            connection.close()
        self._log.close()


def _environments(is_ours: bool, workers: int, devices: int) -> list[Mapping[str, str]]:
    """Return the variables of each process; those of peers as torchrun sets them."""
    logical = {"KERAS_STRATEGY_LOGICAL_CPUS": str(devices)} if is_ours else {}
    if workers == 1:
        return [logical]
    cluster = LocalCluster.on_free_ports(workers)
    if is_ours:
        return [cluster.variables(rank) | logical for rank in range(workers)]
    (port,) = free_ports(1)
    return [
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "GLOO_SOCKET_IFNAME": "lo",
            "TF_CONFIG": cluster.variables(rank)["TF_CONFIG"],
        }
        for rank in range(workers)
    ]


@contextlib.contextmanager
def starter_for(backend: str, workers: int) -> Iterator[WarmStarter]:
    """Context manager of a starter whose processes have imported a backend.

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
            # Backends may set more, which must not differ for what is forked.
            yield starter
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- the row of a comparison


@dataclasses.dataclass(frozen=True)
class _Start:
    """Measurements between the start of all processes and their end.

    Attributes:
        steps: Those of a long turn.
        pairing: The rounds.
        cpu: CPU seconds of both sides, and those out of their turns.
        others: The share of the machine that others used.
        first_steps: Seconds until the first step was done, ours and the peer's.
        peaks: Their peak memory in MB.
    """

    steps: int
    pairing: Pairing
    cpu: tuple[float, float]
    others: float
    first_steps: tuple[float, float]
    peaks: tuple[float, float]


def measure_row(
    starter: WarmStarter,
    comparison: Comparison,
    case: str,
    rounds: int,
    seconds: float,
    starts: int = 1,
) -> dict[str, Any]:
    """Measure a comparison of one case.

    Args:
        starter: What starts the processes.
        comparison: The programs.
        case: The name of the case.
        rounds: How often each of them is timed after a start.
        seconds: About how long it trains each time.
        starts: How often the processes of both are started. One start can be some
            percent faster than the next, with the places that its memory got, and
            its own rounds do not show it.

    Returns:
        The row. Its `noise` is up to 1 where the machine was quiet.
    """
    done = [_start(starter, comparison, case, rounds, seconds) for _ in range(starts)]
    pairing = Pairing(tuple(round for start in done for round in start.pairing.rounds))
    used, idle = (sum(parts) for parts in zip(*(s.cpu for s in done), strict=True))
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
        "idle": idle / used,
        "load": os.getloadavg()[0],
        "noise": max(others / MAX_OTHERS, (high - low) / MAX_SPREAD),
    }


def _start(
    starter: WarmStarter, comparison: Comparison, case: str, rounds: int, seconds: float
) -> _Start:
    """Start the processes of both sides, time them in turn, and end them."""
    with contextlib.ExitStack() as stack:
        sides: list[ProgramProcesses] = []
        for program in comparison.ours, comparison.theirs:
            size = comparison.workers, comparison.devices
            side = ProgramProcesses(starter.start, program, case, *size)
            sides.append(stack.enter_context(side))
            side.ready()  # each has the machine for its first step
        ours, peer = sides
        steps = warm(ours.train, peer.train, seconds, comparison.min_steps)
        load, before = OtherLoad(), _cpu_seconds(sides)
        pairing = compare(ours.train, peer.train, steps, rounds)
        used, idle = (a - b for a, b in zip(_cpu_seconds(sides), before, strict=True))
        return _Start(
            *(steps, pairing, (used, idle), load.share(used)),
            first_steps=(ours.first_step, peer.first_step),
            peaks=(ours.peak_mb, peer.peak_mb),
        )


def _cpu_seconds(sides: list[ProgramProcesses]) -> tuple[float, float]:
    """Return the CPU seconds of both sides, and those outside of their turns."""
    return sum(side.cpu for side in sides), sum(side.idle for side in sides)


def _medians(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [statistics.median(side) for side in zip(*pairs, strict=True)]
