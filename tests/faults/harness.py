"""Plants a fault in one of several workers, and looks at what is left."""

import contextlib
import dataclasses
import pathlib
import re
import signal
import time

import h5py
import keras
import numpy as np

from keras_strategy.testing import WorkerRunner
from tests.distributed.links import Links
from tests.distributed.machines import simulated_machines, skip_without_namespaces
from tests.faults import jobs
from tests.faults.table import (
    EXIT_CLUSTER_NOT_FORMED,
    EXIT_OTHER_WORKER_FAILED,
    FAULTS,
    NOTICED_SECONDS,
    TIMEOUT_SECONDS,
    TOLD,
    Fault,
    Planted,
)
from tests.testing.warm_starter import WarmStarter

# JAX ends a process whose coordinator, in the chief, is gone, and may come first.
JAX_SAYS = "Terminating process because the JAX distributed service"
# How a message names the operation that a worker was in.
OPERATION = re.compile(r"`[^`]+`|could not read |failed in |given the same ")
# What nobody waits for longer.
LIMIT_SECONDS = 140
# How many times as long as they may take they are waited for, to be said how long.
MORE = 2
# How long it may take to say what they are in, and what they started to end with them.
DUMP_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended: its exit status, None where it did not, and when."""

    status: int | None
    at: float
    output: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        seconds: How long it took until the last of the others had ended.
        message: What one of them said.
        wrong: What should not be so.
    """

    seconds: float
    message: str
    wrong: list[str]


def plant(planted: Planted, folder: pathlib.Path, starter: WarmStarter) -> Outcome:
    """Starts workers, of which one gets a fault, and judges how all of them end."""
    fault = FAULTS[planted.fault]
    temporary, files = folder / "temporary", folder / "files"
    temporary.mkdir()
    files.mkdir()
    environment = {"TMPDIR": str(temporary)}
    waits = TIMEOUT_SECONDS if fault.silent or planted.place == "start" else 0
    if waits:
        environment["KERAS_STRATEGY_TIMEOUT_SECONDS"] = str(waits)
        if planted.victim == 0:
            # A chief that writes is waited for as long as that may take.
            environment["KERAS_STRATEGY_SAVE_TIMEOUT_SECONDS"] = str(waits)
    allowed_seconds = fault.seconds or NOTICED_SECONDS + waits
    arguments = {"environment": environment, "starter": starter}
    with contextlib.ExitStack() as stack:
        machines, links = [], None
        if fault.on_machines:
            skip_without_namespaces()
            links = Links(folder / "links", planted.workers)
            options = {"links": links, "wrong_interface": True}
            made = simulated_machines(planted.workers, **options)
            machines = stack.enter_context(made)
        runner = WorkerRunner(planted.workers, timeout_seconds=280, **arguments)
        stack.enter_context(runner)
        fault_arguments = dataclasses.asdict(planted), str(files), machines, links
        runner.start(jobs.work, *fault_arguments)
        happened = files / jobs.HAPPENED
        ends = _wait(runner, planted, fault, happened, allowed_seconds)
        ended = [r for r, end in ends.items() if end.status is not None]
        processes = _processes([runner.processes[rank].pid for rank in ended])
    if not happened.exists():
        return Outcome(0, "", ["it did not happen", *_outputs(ends)])
    victim = ends.pop(planted.victim)
    seconds = max(end.at for end in ends.values()) - float(happened.read_text())
    message = ""
    wrong = _statuses(planted, fault, victim, ends)
    if fault.says:
        message, silent = _said(planted, fault, ends)
        wrong += [f"worker {rank} does not say why" for rank in silent]
        if seconds > allowed_seconds:
            wrong.append(f"the others took {seconds:.0f} s to end")
    wrong += [f"a process is left: {name}" for name in processes]
    left = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*"))
    wrong += [f"in the temporary folder there is {name}" for name in left]
    wrong += _unreadable(files)
    if wrong:
        wrong += _outputs({**ends, planted.victim: victim})
    return Outcome(seconds, message, wrong)


def _wait(
    runner: WorkerRunner,
    planted: Planted,
    fault: Fault,
    happened: pathlib.Path,
    allowed_seconds: float,
) -> dict[int, End]:
    """Waits until all have ended, the worker with the fault last.

    Some seconds after it happened nobody is to be there any more. Who is, is made to
    say what it is in.
    """
    statuses: dict[int, tuple[int | None, float]] = {}
    others = set(range(planted.workers)) - {planted.victim}

    def wait(ranks: set[int], seconds: float, since: pathlib.Path | None = None):
        deadline = time.monotonic() + seconds
        while not ranks <= statuses.keys() and time.monotonic() < deadline:
            time.sleep(0.005)
            if since is not None and since.exists():
                since, deadline = None, time.monotonic() + MORE * allowed_seconds
            for rank in set(range(planted.workers)) - statuses.keys():
                status = runner.processes[rank].poll()
                if status is not None:
                    statuses[rank] = status, time.monotonic()

    wait(others, LIMIT_SECONDS, happened)
    for rank in others - statuses.keys():
        runner.kill(rank, signal.SIGABRT)
    wait(others, DUMP_SECONDS)
    if fault.stopped:
        runner.kill(planted.victim, signal.SIGCONT)
    if fault.status is not None:
        wait({planted.victim}, NOTICED_SECONDS)
    never = None, time.monotonic()
    return {
        rank: End(*statuses.get(rank, never), runner.output(rank))
        for rank in range(planted.workers)
    }


def _statuses(
    planted: Planted, fault: Fault, victim: End, others: dict[int, End]
) -> list[str]:
    """What is wrong with the exit statuses."""
    wrong = []
    # Who has ended by itself waits in JAX for the others, of which the chief is gone.
    of_jax = victim.status == -signal.SIGABRT and JAX_SAYS in victim.output
    told = victim.status == EXIT_OTHER_WORKER_FAILED and planted.place in TOLD
    own = fault.status is None or victim.status in fault.status or of_jax or told
    # A worker whose machine is cut off has not met the others either.
    is_alone = fault.on_machines and planted.place == "start"
    if not (own or (is_alone and victim.status == EXIT_CLUSTER_NOT_FORMED)):
        wrong.append(f"the worker itself ended with {victim.status}")
    allowed = fault.others
    if fault.says and planted.place == "start":
        allowed = (*allowed, EXIT_CLUSTER_NOT_FORMED)
    succeeded = {end.status == 0 for end in (victim, *others.values())}
    if 0 in allowed and len(succeeded) > 1:
        wrong.append("some workers succeeded and others failed")
    for rank, end in others.items():
        of_jax = end.status == -signal.SIGABRT and _jax_came_first(planted, end)
        if end.status not in allowed and not of_jax:
            wrong.append(f"worker {rank} ended with {end.status}, not {allowed}")
    return wrong


def _jax_came_first(planted: Planted, end: End) -> bool:
    jax = keras.backend.backend() == "jax" and planted.victim == 0
    return jax and JAX_SAYS in end.output


def _said(
    planted: Planted, fault: Fault, others: dict[int, End]
) -> tuple[str, list[int]]:
    """A message of the others, and who of them has none."""
    words = re.compile(fault.says.format(victim=f"worker {planted.victim}"))
    message, silent = "", []
    for rank, end in others.items():
        lines = [line for line in end.output.splitlines() if words.search(line)]
        # Whom nobody has met yet was in no operation with others.
        if planted.place != "start":
            lines = [line for line in lines if OPERATION.search(line)]
        if lines:
            message = lines[0]
        elif _jax_came_first(planted, end):
            message = message or f"{JAX_SAYS} ..."
        elif end.status != 0:
            silent.append(rank)
    return message, silent


def _processes(groups: list[int]) -> list[str]:
    """The processes that workers have left behind, each of which led a group."""
    deadline = time.monotonic() + DUMP_SECONDS
    while (found := _members(groups)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _members(groups: list[int]) -> list[str]:
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
            state, _, group, *_ = rest.split()
            if int(group) in groups and state not in "ZX":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended
    return found


def _unreadable(folder: pathlib.Path) -> list[str]:
    """What is wrong with the files that the workers have saved."""
    wrong = []
    for path in sorted(folder.rglob("*")):
        # What is not whole has another name, and is removed by the next that saves.
        if not path.is_file() or any(p.endswith(".part") for p in path.parts):
            continue
        try:
            if path.suffix == ".keras":
                keras.models.load_model(path, custom_objects=jobs.OWN)
            elif path.suffix == ".h5":
                with h5py.File(path) as file:
                    file.visititems(lambda name, item: None)
            elif path.suffix == ".npz":
                with np.load(path) as arrays:
                    _ = [arrays[name] for name in arrays.files]
        except Exception as error:
            wrong.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    return wrong


def _outputs(ends: dict[int, End]) -> list[str]:
    return [
        f"--- worker {rank} ({end.status}):\n{end.output[-20_000:]}"
        for rank, end in sorted(ends.items())
    ]
