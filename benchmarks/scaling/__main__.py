"""Measures the constants of the model on this machine, and checks what it predicts.

    KERAS_BACKEND=torch python -m benchmarks.scaling [--json FILE]

It also measures the rows per second of a slow source with more and more workers.
"""

import argparse
import json
import os

from benchmarks.scaling.measurements import measure_worker
from benchmarks.scaling.model import Link, Step
from benchmarks.tables import markdown
from keras_strategy.testing import WorkerRunner

WORKERS = (1, 2, 4)
# One core for each worker, as one device.
ONE_THREAD = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    measured, environment = {}, dict.fromkeys(ONE_THREAD, "1")
    for workers in WORKERS:
        with WorkerRunner(
            workers, timeout_seconds=900, environment=environment
        ) as runner:
            measured[workers], *_ = runner.run(measure_worker, workers)
        for threads, speed in measured[workers]["input"].items():
            reader = f"a slow source, {threads} threads, {workers} workers"
            print(f"{reader}: {speed:.0f} rows/s", flush=True)
    cores = len(os.sched_getaffinity(0))
    link = Link.fitted(2, measured[2]["all_reduce"])
    rows, lines = [], []
    for case, alone in measured[1]["steps"].items():
        step = Step(compute=alone["seconds"], gradients=alone["gradients"])
        for workers in WORKERS:
            seconds = measured[workers]["steps"][case]["seconds"]
            predicted = step.seconds(workers, link, workers / cores)
            row = {"case": case, "workers": workers}
            rows.append({**row, "measured": seconds, "predicted": predicted})
            name = f"{case}, {alone['gradients'] / 1e6:.2f} MB"
            found = f"{predicted * 1e3:.2f} ({predicted / seconds - 1:+.0%})"
            times = f"{seconds * 1e3:.2f}", found if workers > 1 else ""
            lines.append((name, str(workers), *times))
    constants = f"{link.latency * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s"
    lines.append(("a sum's latency and bandwidth", "2", constants, ""))
    columns = "model, gradients", "workers", "measured, ms per step", "predicted"
    print("", markdown(columns, lines), sep="\n")
    if options.json:
        constants = {"latency": link.latency, "bandwidth": link.bandwidth}
        with open(options.json, "w") as file:
            figures = {**constants, "cores": cores, "measured": measured, "rows": rows}
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
