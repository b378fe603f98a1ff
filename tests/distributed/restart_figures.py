"""Prints how far trainings that were interrupted end from those that were not.

    python -m tests.distributed.restart_figures

It is the table of docs/restarts.md: the largest difference of a weight or of a slot.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.tables import markdown
from conformance.compare import largest
from keras_strategy.testing import WorkerRunner
from tests.distributed import resume_jobs
from tests.testing.warm_starter import WarmStarter

BACKENDS = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}
ACROSS = (("jax", "torch"), ("jax", "tensorflow"), ("torch", "jax"))
# Workers before, and after.
COUNTS = ((2, 2), (2, 3), (2, 1), (1, 2))


Run = Callable[..., list[Any]]


@contextlib.contextmanager
def warm() -> Iterator[Run]:
    """Runs a function in a number of workers."""
    with WarmStarter(["keras", "tensorflow"]) as starter:

        def run(count: int, function: Any, *arguments: Any) -> list[Any]:
            with WorkerRunner(count, timeout_seconds=300, starter=starter) as runner:
                return runner.run(function, *arguments)

        yield run


def interrupt(function: Any, folder: pathlib.Path, run: Run) -> None:
    """Interrupts one worker and two, and saves what two end with who are not."""
    for count in (1, 2):
        run(count, function, str(folder / str(count)), True)
    whole = run(2, function, str(folder / "whole"))[0]
    np.savez(folder / "whole.npz", *whole["weights"])


def gone_on(function: Any, folder: pathlib.Path, run: Run) -> list[float]:
    """Return the largest differences of resumed trainings, in the order of `COUNTS`."""
    with np.load(folder / "whole.npz") as file:
        whole = [file[f"arr_{i}"] for i in range(len(file.files))]
    figures = []
    for before, after in COUNTS:
        copy = folder / f"{before} to {after}"
        shutil.copytree(folder / str(before), copy)
        results = run(after, function, str(copy), False, 99)
        figures.append(max(float(largest(whole, r["weights"])) for r in results))
    return figures


def of_one_backend(folder: pathlib.Path, backend: str) -> dict[str, list[float]]:
    """The figures on this backend, and for those who go on on this one."""
    figures = {}
    with warm() as run:
        own = folder / f"{backend} alone"
        interrupt(resume_jobs.train, own, run)
        figures[BACKENDS[backend]] = gone_on(resume_jobs.train, own, run)
        for before, after in ACROSS:
            if after == backend:
                place = folder / f"{before} to {after}"
                shutil.copytree(folder / before, place)
                anywhere = resume_jobs.workers_train_anywhere
                name = f"{BACKENDS[before]}, then {BACKENDS[after]}"
                figures[name] = gone_on(anywhere, place, run)
    return figures


def main() -> None:
    """Runs all backends one after the other, and prints the table."""
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in ("interrupt", "measure"):
            for backend in BACKENDS:
                if step == "interrupt" and backend not in dict(ACROSS):
                    continue
                done = subprocess.run(
                    [sys.executable, "-m", __spec__.name, step, folder],
                    env={**os.environ, "KERAS_BACKEND": backend},
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    sys.exit(done.stdout + done.stderr)
                if step == "measure":
                    figures |= json.loads(done.stdout.splitlines()[-1])
    columns = ["saved on, resumed on"]
    columns += [f"{before}, then {after} workers" for before, after in COUNTS]
    lines = [(n, *(f"{value:.0e}" for value in row)) for n, row in figures.items()]
    print(markdown(columns, lines))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        step, place = sys.argv[1], pathlib.Path(sys.argv[2])
        if step == "interrupt":
            with warm() as run:
                own = place / os.environ["KERAS_BACKEND"]
                interrupt(resume_jobs.workers_train_anywhere, own, run)
        else:
            print(json.dumps(of_one_backend(place, os.environ["KERAS_BACKEND"])))
