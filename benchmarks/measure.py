"""The comparisons of one backend that run in processes of one shape.

A process has one backend and one number of devices, so `python -m benchmarks` starts
this module for each: see `Shape` there. Its results are lines of JSON in a file.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable

import keras

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import of_backend
from benchmarks.figures import figures_of
from benchmarks.pairing import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()

    together: Callable[[float], float] = float
    chief = True
    if options.workers > 1:
        # The cluster of the process; the comparisons' own strategies join the same.
        strategy = ks.MultiWorkerMirroredStrategy()
        chief = strategy.extended.cluster.is_chief
        together = _of_all(strategy)
    for comparison in of_backend():
        if (comparison.devices, comparison.workers) != (
            options.devices,
            options.workers,
        ):
            continue
        for case in CASES:
            row = {
                "case": f"{case.name}: {comparison.name}",
                "backend": keras.backend.backend(),
                "replicas": comparison.replicas,
            }
            name = f"{row['case']} / {comparison.peer}"
            if case.name in comparison.without or options.only not in name:
                continue
            began = time.perf_counter()
            ours, peer = comparison.programs(case)
            speeds = compare(
                ours, peer, options.rounds, options.seconds, together=together
            )
            # Last, since a profiler stays with the threads that it met.
            figures = (
                figures_of(ours, case.build()) if comparison.replicas > 1 else None
            )
            if not chief:
                continue
            with open(options.out, "a") as file:
                for speed in speeds:
                    values = dataclasses.asdict(speed)
                    more = {"peer_name": comparison.peer, "aim": comparison.aim}
                    if figures is not None:
                        more["figures"] = dataclasses.asdict(figures)
                    print(json.dumps(row | values | more), file=file)
            ratio = ", ".join(f"{s.ratio:.3f} ({s.unit})" for s in speeds)
            taken = time.perf_counter() - began
            if figures is not None:
                print(f"{row['backend']}: {row['case']}, a step: {figures}", flush=True)
            print(f"{row['backend']}: {name}: {ratio} [{taken:.0f} s]", flush=True)


def _of_all(strategy: ks.Strategy) -> Callable[[float], float]:
    """Adds up what the processes measured; all of them wait for each other in it."""
    cluster = strategy.extended.cluster

    def together(value: float) -> float:
        return sum(cluster.agree("a round of the benchmark", value))

    return together


if __name__ == "__main__":
    main()
    if "TF_CONFIG" not in os.environ:
        # Engines may take seconds to end their threads, which nobody waits for.
        os._exit(0)
