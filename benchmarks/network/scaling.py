"""Times steps on links of a known rate, where computing takes no core.

    python -m benchmarks.network.scaling [--links "1 Gbit/s"] [--json FILE]

Each worker is a simulated machine, so it needs Linux and root. The batch grows with the
workers, and the efficiency is the time of a step of one worker divided by that of a
step. A step's computation is a sleep: see `benchmarks.network.emulated`. The peer is a
loop by hand under DistributedDataParallel, with buckets of the same size. The model of
`benchmarks.scaling` predicts the steps from sums between two machines.
"""

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "torch"

from benchmarks.network import emulated
from benchmarks.scaling.fitting import fitted_link
from benchmarks.scaling.model import Step
from benchmarks.sides import starter_for
from keras_strategy.testing import WorkerRunner
from tests.distributed.machines import simulated_machines

LINKS = {"10 Gbit/s": 10_000, "1 Gbit/s": 1_000, "100 Mbit/s": 100}
WORKERS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    rows = []
    with starter_for("torch", max(options.workers)) as starter:

        def run(count, rate, function, *arguments):
            with (
                simulated_machines(count, rate_mbit=rate) as machines,
                WorkerRunner(count, timeout_seconds=500, starter=starter) as runner,
            ):
                return runner.run(function, *arguments, machines)

        for name in options.links:
            rate = LINKS[name]
            link = fitted_link(2, run(2, rate, emulated.measure_link)[0])
            print(
                f"{name}: latency {link.latency * 1e6:.0f} us, "
                f"{link.bandwidth / 1e6:.1f} MB/s",
                flush=True,
            )
            alone: dict = {}
            for count in (1, *options.workers):
                row = {"link": name, "workers": count}
                for program in emulated.PROGRAMS:
                    found = run(count, rate, emulated.measure_step, program)
                    row[program] = max(seconds for seconds, _ in found)
                    row[f"{program}, bytes"] = max(sent for _, sent in found)
                alone = alone or dict(row)
                step = Step(alone["ours"], emulated.GRADIENT_BYTES, emulated.OVERLAP)
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
    cells += [f"{row[f'{program}, bytes'] / 1e6:.1f}" for program in emulated.PROGRAMS]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
