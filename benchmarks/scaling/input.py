"""Rows per second of a slow source, with more and more workers: ours and peers'.

A row takes 5 ms to read, as from a network, and is decoded in Python.

    python -m benchmarks.scaling.input --backends torch --json input.json --page

measures, adds to the JSON what it measured, and writes all of that into
docs/benchmarks.md, with the figures of a step that no machine changes.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keras_strategy.commands.local_cluster import free_ports
from keras_strategy.testing import WorkerRunner

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
WORKERS = (1, 2, 4)
BACKENDS = ("torch", "jax", "tensorflow")
_MARKED = re.compile(r"(?<=<!-- slow source -->\n).*?(?=<!-- end -->)", re.S)
# Who reads, and with how many threads or processes a worker reads at once.
OURS = (("ours", 0), ("ours", 2))
KERAS = (("keras", 1), ("keras", 2))
DDP = (("ddp", 0), ("ddp", 2))
NAMES = {
    ("ours", 0): "`fit` of an `IndexedDataset`",
    ("ours", 2): "`fit` of an `IndexedDataset`, `threads=2`",
    ("keras", 1): "plain Keras, `PyDataset`, `workers=1`",
    ("keras", 2): "plain Keras, `PyDataset`, `workers=2`",
    ("ddp", 0): "`DistributedDataParallel`, `DistributedSampler`",
    ("ddp", 2): "the same, `num_workers=2`",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling.input", description=__doc__
    )
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--json", metavar="FILE", help="where the figures are kept")
    parser.add_argument("--page", action="store_true", help="write the docs")
    parser.add_argument("--note", help="what the docs say of the machine")
    options = parser.parse_args()
    kept = Path(options.json) if options.json else None
    found: dict[str, Any] = {"speeds": {}, "steps": {}}
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text())
    for backend in options.backends:
        sides = {(side, at_once): WORKERS for side, at_once in OURS}
        sides |= dict.fromkeys(KERAS, (1,))
        if backend == "torch":
            sides |= dict.fromkeys(DDP, WORKERS)
        for (side, at_once), counts in sides.items():
            speeds = {n: _measured(backend, side, at_once, n) for n in counts}
            found["speeds"][f"{backend} {side} {at_once}"] = speeds
            said = ", ".join(f"{n}: {s:.0f} rows/s" for n, s in speeds.items())
            print(f"{backend}, {NAMES[side, at_once]}: {said}", flush=True)
            _keep(found, kept)
        found["steps"][backend] = steps = _steps(backend)
        for kind, figures in steps.items():
            print(f"{backend}, {kind}: {figures}", flush=True)
        _keep(found, kept)
    if options.note:
        found["note"] = options.note
        _keep(found, kept)
    if options.page:
        found = json.loads(json.dumps(found))  # as it is kept, if it was not
        said = f"\n{page(found)}\n\n"
        text, count = _MARKED.subn(lambda _: said, PAGE.read_text())
        if count != 1:
            raise ValueError("The page must have the marks of these figures once.")
        PAGE.write_text(text)


def _keep(found: dict[str, Any], kept: Path | None) -> None:
    found["date"] = datetime.date.today().isoformat()
    found["machine"] = f"{os.cpu_count()} cores"
    if kept is not None:
        kept.write_text(json.dumps(found, indent=1) + "\n")


def _measured(backend: str, side: str, at_once: int, workers: int) -> float:
    """Rows per second of all workers together."""
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **os.environ,
        "KERAS_BACKEND": backend,
        "NPROC": "8",
        # Workers share the cores.
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m"]
    if side == "ours" and workers > 1:
        launcher = ["-m", "keras_strategy", "run", f"--workers={workers}", "-m"]
    ranks = workers if side == "ddp" else 1
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0])}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures")
        command = [
            *(sys.executable, *launcher, "benchmarks.scaling.input_side", side),
            *(f"--out={out}", f"--workers={workers}", f"--at-once={at_once}"),
        ]
        started = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            )
            for rank in range(ranks)
        ]
        if any([process.wait() for process in started]):
            raise RuntimeError(f"{command} failed.")
        return json.loads(out.read_text())


def _steps(backend: str) -> dict[str, dict[str, float]]:
    """Return the figures of one of two workers, by kind of data."""
    from benchmarks.input_figures import figures_of_inputs

    environment = {"KERAS_BACKEND": backend}
    with WorkerRunner(2, timeout_seconds=300, environment=environment) as runner:
        return runner.run(figures_of_inputs)[0]


def page(found: dict[str, Any]) -> str:
    """Return figures as Markdown."""
    lines = [
        f"Rows per second of all workers, on {found['date']}, {found['machine']}"
        f"{found.get('note', '')}. One reader gives 200 at most. By "
        "`python -m benchmarks.scaling.input`:",
        "",
        "| backend | who reads | 1 worker | 2 | 4 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, speeds in found["speeds"].items():
        backend, side, at_once = name.split()
        cells = [f"{speeds[str(n)]:.0f}" if str(n) in speeds else "" for n in WORKERS]
        who = NAMES[side, int(at_once)]
        lines.append(f"| {backend} | {who} | {' | '.join(cells)} |")
    if not found["steps"]:
        return "\n".join(lines)
    lines += [
        "",
        "One of 2 workers does this for a step of 8 rows, on any machine "
        "(`tests/speed/test_input_figures.py`):",
        "",
        "| backend | data | rows read | bytes of rows sent "
        "| waits for the coordinator | collectives |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for backend, kinds in found["steps"].items():
        for kind, figures in kinds.items():
            cells = " | ".join(f"{value:g}" for value in figures.values())
            lines.append(f"| {backend} | {kind} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
