"""Process of one system: `python -m conformance.server SYSTEM OPTIONS`.

It imports Keras and the backend once, which takes seconds, and forks a fresh process
for each replica of each cell, so that a crash or a hang ends one cell. Its output is a
line of JSON for each cell.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from conformance.compare import LOGS, WEIGHTS, largest
from conformance.program import Program, select
from conformance.systems import ALL, System
from conformance.systems.training import NotApplicable, Outcome
from keras_strategy.commands.local_cluster import free_ports

# The longest a cell may take, and how long the other replicas of a failed one may.
CELL_SECONDS = 60.0
GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.01


class CellError(Exception):
    """Failure of a cell, in the words of its process."""


def compare(one: Outcome, many: Outcome) -> dict[str, Any]:
    """Return the largest differences of the weights and of the logs."""
    missing = one.logs.keys() ^ many.logs.keys()
    if missing:
        raise ValueError(f"no log {sorted(missing)[0]!r} in one of the two")
    return {
        "weights": largest(one.weights, many.weights),
        "logs": largest(list(one.logs.values()), [many.logs[key] for key in one.logs]),
        "warnings": many.warnings,
    }


def is_equal(cell: dict[str, Any]) -> bool:
    """Return True if a cell is within the tolerances."""
    return cell.get("weights", np.inf) <= WEIGHTS and cell.get("logs", np.inf) <= LOGS


def run_forked(
    module: str, processes: int, program: Program, replicas: int, initial: Any
) -> Outcome:
    """Run a program in forked processes, and return the first one's outcome.

    Raises:
        CellError: If a process failed, crashed, or took too long.
        NotApplicable: If the system is not made for the program.
    """
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children: dict[int, int] = {}
        for rank in range(processes):
            with warnings.catch_warnings():
                # Backends warn of forks; none has used a device here.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if not pid:
                if processes > 1:  # as torchrun sets them
                    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
                    os.environ |= dict.fromkeys(sizes, str(processes))
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                _run_child(folder, rank, module, program, replicas, initial)
            children[pid] = rank
        failure = _wait(children, folder)
        for rank in range(processes):
            path = folder / f"{rank}.pickle"
            if not path.exists():
                continue
            result = pickle.loads(path.read_bytes())
            if isinstance(result, NotApplicable):
                raise result
            if not failure and isinstance(result, Outcome):
                return result
        raise CellError(failure or "the process left no result")


def _run_child(folder: Path, rank: int, module: str, *arguments: Any) -> None:
    """Run a program in a forked process, write the outcome, and exit."""
    status, log = 0, os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(int(2 * CELL_SECONDS))  # if the server ends first
    try:
        system = importlib.import_module(f"conformance.systems.{module}")
        if hasattr(system, "prepare"):
            system.prepare(arguments[1])
        result = system.run(*arguments)
    except NotApplicable as reason:
        result = reason
    except BaseException as error:
        traceback.print_exc()
        # Keras's first line only names the layer.
        texts = [line for line in str(error).splitlines() if line.strip()] or [""]
        is_wrapped = texts[0].startswith("Exception encountered") and len(texts) > 1
        text = re.sub(r"\x1b\[\d*m", "", texts[is_wrapped])
        result, status = f"{type(error).__name__}: {text}", 1
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(folder / f"{rank}.pickle")
    os._exit(status)


def _wait(children: dict[int, int], folder: Path) -> str:
    """Wait for all children, and return the first failure or an empty string."""
    deadline, failure = time.monotonic() + CELL_SECONDS, ""
    while children and time.monotonic() < deadline:
        for pid, rank in list(children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del children[pid]
            if status and not failure:
                failure = _describe(folder, rank, status)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if children and not failure:
        failure = f"hangs: no result within {CELL_SECONDS:.0f} s"
    return failure


def _describe(folder: Path, rank: int, status: int) -> str:
    path = folder / f"{rank}.pickle"
    if path.exists():
        return str(pickle.loads(path.read_bytes()))
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    log = (folder / f"{rank}.log").read_text(errors="replace")
    thrown = re.findall("instance of '(.+?)'", log)
    return f"{name or status}: {thrown[0] if thrown else 'the process died'}"


def reference(program: Program, folder: Path) -> Outcome:
    """Return the outcome of one device, which the systems of a backend share."""
    path = folder / f"{program.name}-{program.rows}.pickle"
    if not path.exists():
        outcome = run_forked("reference", 1, program, 1, None)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(outcome))
        unfinished.rename(path)
    return pickle.loads(path.read_bytes())


def run_cell(
    system: System, program: Program, replicas: int, folder: Path
) -> dict[str, Any]:
    """Return what one system gives for one program on N replicas."""
    start = time.monotonic()
    try:
        one = reference(program, folder)
        processes = replicas if system.processes else 1
        how = system.module, processes, program, replicas, one.initial
        cell = compare(one, run_forked(*how))
    except NotApplicable as reason:
        cell = {"skipped": str(reason)}
    except (CellError, ValueError) as error:
        cell = {"error": str(error)}
    return {**cell, "seconds": round(time.monotonic() - start, 1)}


def import_backend() -> dict[str, str]:
    """Import Keras and the backend without using a device, and return versions."""
    import keras

    importlib.import_module(keras.backend.backend())
    # `keras.utils.set_random_seed` imports it on every backend, where it is installed.
    importlib.import_module("tensorflow")
    # What was imported is not garbage, and a fork copies what a collection touches.
    gc.collect()
    gc.freeze()
    found = {"keras": keras.__version__}
    for name in ("jax", "torch", "tensorflow", "accelerate", "lightning-fabric"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.setdefault("tensorflow", sys.modules["tensorflow"].__version__)
    return found


def main() -> None:
    """Run the cells of one system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("--replicas", type=int, nargs="+")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    system = ALL[options.system]
    programs = select(options.only)
    versions = import_backend()
    print(json.dumps({"system": system.name, "versions": versions}), flush=True)
    folder = options.folder / f"{system.backend}-{versions['keras']}"
    folder.mkdir(parents=True, exist_ok=True)

    def report(program: Program, replicas: int, rows: str) -> bool:
        cell = run_cell(system, program, replicas, folder)
        equal = is_equal(cell)
        place = {"system": system.name, "program": program.name, "rows": rows}
        line = {**place, "replicas": replicas, "equal": equal, **cell}
        print(json.dumps(line), flush=True)
        return equal or "skipped" in cell

    for program in programs:
        good = [report(program, n, "uneven") for n in options.replicas]
        if not all(good):
            report(program.with_full_batches(), options.replicas[0], "full")


if __name__ == "__main__":
    main()
