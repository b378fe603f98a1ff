"""Times steps on links of a known rate, where computing takes no core.

    python -m benchmarks.network.scaling [--links "1 Gbit/s"] [--json FILE]

Each worker is a simulated machine, so it needs Linux and root. The batch grows with the
workers, and the efficiency is the time of a step of one worker divided by that of a
step. A step's computation is a sleep: see `benchmarks.network.sleeping_model`. The peer
is a loop by hand under DistributedDataParallel, with buckets of the same size. The
model of `benchmarks.scaling` predicts the steps from sums between two machines.
"""

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "torch"

from benchmarks.network import run_on_machines, sleeping_model
from benchmarks.paired_processes import starter_for
from benchmarks.scaling.model import Link, Step

LINKS = {"10 Gbit/s": 10_000, "1 Gbit/s": 1_000, "100 Mbit/s": 100}
WORKERS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    rows = []
    with starter_for("torch", max(WORKERS)) as starter:
        for name in options.links:
            rate = {"rate_mbit": LINKS[name]}
            times, _ = run_on_machines(starter, 2, rate, sleeping_model.measure_link)
            link = Link.fitted(2, times)
            latency, bandwidth = link.latency * 1e6, link.bandwidth / 1e6
            print(f"{name}: latency {latency:.0f} us, {bandwidth:.1f} MB/s", flush=True)
            alone: dict = {}
            for count in WORKERS:
                row = {"link": name, "workers": count}
                for program in sleeping_model.PROGRAMS:
                    found = run_on_machines(
                        starter, count, rate, sleeping_model.measure_step, program
                    )
                    row[program], row[f"{program}, bytes"] = map(
                        max, zip(*found, strict=True)
                    )
                alone = alone or row
                step = Step(
                    *(alone["ours"], sleeping_model.GRADIENT_BYTES),
                    sleeping_model.OVERLAP,
                )
                row["predicted"] = step.seconds(count, link)
                rows.append(row)
                print(_line(row, alone), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def _line(row: dict, alone: dict) -> str:
    """Return a row of the table: seconds, efficiencies, and megabytes sent."""
    cells = [row["link"], row["workers"]]
    for key, compute in (("ours", "ours"), ("DDP", "DDP"), ("predicted", "ours")):
        cells.append(f"{row[key]:.3f} ({alone[compute] / row[key]:.0%})")
    for program in sleeping_model.PROGRAMS:
        cells.append(f"{row[f'{program}, bytes'] / 1e6:.1f}")
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
