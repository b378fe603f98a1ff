"""Measures the constants of the model on this machine, and checks what it predicts.

    KERAS_BACKEND=torch python -m benchmarks.scaling [--json FILE]

It also measures the rows per second of a slow source with more and more workers.
"""

import argparse
import json
import os

from benchmarks.scaling.measurements import measure_worker
from benchmarks.scaling.model import ANCHORS, Link, Step
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
    print(
        f"{cores} cores: latency {link.latency * 1e6:.0f} us, "
        f"bandwidth {link.bandwidth / 1e9:.2f} GB/s"
    )
    rows = []
    for case, alone in measured[1]["steps"].items():
        step = Step(compute=alone["seconds"], gradients=alone["gradients"])
        for workers in WORKERS:
            seconds = measured[workers]["steps"][case]["seconds"]
            predicted = step.seconds(workers, link, workers / cores)
            row = {"case": case, "workers": workers}
            rows.append({**row, "measured": seconds, "predicted": predicted})
            print(
                f"{case}, {workers} workers: {seconds * 1e3:.2f} ms, "
                f"predicted {predicted * 1e3:.2f} ms"
            )
    for anchor in ANCHORS:
        for devices in (8, 64, 512):
            low, high = anchor.predict(devices)
            print(f"{anchor.model}, {devices} GPUs: {low:.0%} to {high:.0%}")
    if options.json:
        constants = {"latency": link.latency, "bandwidth": link.bandwidth}
        with open(options.json, "w") as file:
            figures = {**constants, "cores": cores, "measured": measured, "rows": rows}
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
