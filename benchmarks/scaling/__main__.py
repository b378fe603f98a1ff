"""Measures the constants of the model on this machine, and checks what it predicts."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.scaling.fitting import fitted_link
from benchmarks.scaling.model import Link, Step
from benchmarks.scaling.published import ANCHORS, ETHERNET_25

ROOT = Path(__file__).parents[2]
WORKERS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__
    )
    parser.add_argument("--backend", default="torch", help="torch, if not given")
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args()

    measured = {n: _measured(options.backend, n) for n in WORKERS}
    cores = len(os.sched_getaffinity(0))
    link = fitted_link(
        2, {int(size): t for size, t in measured[2]["all_reduce"].items()}
    )
    print(
        f"{options.backend}, {cores} cores: latency {link.latency * 1e6:.0f} us, "
        f"bandwidth {link.bandwidth / 1e9:.2f} GB/s"
    )
    rows = list(_checked(measured, link, cores))
    for row in rows:
        print(
            f"{row['case']}, {row['workers']} workers: {row['measured'] * 1e3:.2f} ms, "
            f"predicted {row['predicted'] * 1e3:.2f} ms"
        )
    for anchor in ANCHORS:
        for devices in (8, 64, 512):
            low, high = (
                anchor.step(overlap).efficiency(devices, ETHERNET_25)
                for overlap in (0, 2 / 3)
            )
            print(f"{anchor.model}, {devices} GPUs: {low:.0%} to {high:.0%}")
    figures = {
        "backend": options.backend,
        "cores": cores,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
        "measured": measured,
        "rows": rows,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def _measured(backend: str, workers: int) -> dict:
    """Return the chief's measurements with a number of workers."""
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **os.environ,
        "KERAS_BACKEND": backend,
        # One core for each worker, as one device.
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
    }
    launcher = []
    if workers > 1:
        launcher = ["keras_strategy", "run", f"--workers={workers}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures")
        command = [
            *(sys.executable, "-m", *launcher, "benchmarks.scaling.worker"),
            *(f"--out={out}", f"--workers={workers}"),
        ]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return json.loads(out.read_text())


def _checked(measured: dict[int, dict], link: Link, cores: int):
    """Each measured step beside the predicted one."""
    for case, alone in measured[1]["steps"].items():
        step = Step(compute=alone["seconds"], gradients=alone["gradients"])
        for workers in WORKERS:
            yield {
                "case": case,
                "workers": workers,
                "measured": measured[workers]["steps"][case]["seconds"],
                "predicted": step.seconds(workers, link, workers / cores),
            }


if __name__ == "__main__":
    main()
