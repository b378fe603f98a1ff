"""Runs the benchmarks: `python -m benchmarks --json FILE`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import table

ROOT = Path(__file__).parents[1]
BACKENDS = ("jax", "torch", "tensorflow")


@dataclass(frozen=True)
class Shape:
    """The processes that a comparison needs.

    Attributes:
        devices: The devices of each process.
        workers: How many processes there are.
    """

    devices: int
    workers: int


SHAPES = {
    "jax": (Shape(1, 1), Shape(2, 1)),
    "torch": (Shape(1, 1), Shape(2, 1), Shape(1, 2)),
    "tensorflow": (Shape(1, 1), Shape(2, 1)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="where the rows are written")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rounds", type=int, default=7, help="of both programs")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="that a program trains in a round"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="what the names must hold"
    )
    options = parser.parse_args()
    began = time.monotonic()
    rows, status = [], 0
    for backend in options.backends:
        for shape in SHAPES[backend]:
            more, failed = _measured(backend, shape, options)
            rows += more
            status |= failed
    print(table(rows))
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return status


def _measured(
    backend: str, shape: Shape, options: argparse.Namespace
) -> tuple[list[dict], int]:
    """The rows of the processes of one shape, and whether they failed."""
    environment = {
        # XLA sizes the thread pool of its CPU devices by it, see the Makefile.
        "NPROC": "8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **os.environ,
        "KERAS_BACKEND": backend,
    }
    launcher = []
    if shape.workers == 1:
        environment["KERAS_STRATEGY_LOGICAL_CPUS"] = str(shape.devices)
    else:
        launcher = [
            *("keras_strategy", "run", f"--workers={shape.workers}"),
            *(f"--devices-per-worker={shape.devices}", "-m"),
        ]
        # What they share they must not fight for: one core for each process.
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows")
        command = [
            *(sys.executable, "-m", *launcher, "benchmarks.measure"),
            *(f"--out={out}", f"--only={options.only}"),
            *(f"--devices={shape.devices}", f"--workers={shape.workers}"),
            *(f"--rounds={options.rounds}", f"--seconds={options.seconds}"),
        ]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        lines = out.read_text().splitlines() if out.exists() else []
    if status:
        print(f"{backend}, {shape}: ended with status {status}", file=sys.stderr)
    return [json.loads(line) for line in lines], int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
