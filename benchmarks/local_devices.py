"""Speed of a strategy on this machine's devices, against Keras alone on one of them.

    python -m benchmarks.local_devices
    KERAS_BACKEND=jax python -m benchmarks.local_devices --devices 2 --json
    python -m benchmarks.local_devices --units 4096 --batch-size 8192

Both train the same model on the same rows with `fit`, in turn, in one process.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.cases import Case, build_mlp
from benchmarks.paired_timing import WALL, OtherLoad, compare, turn_of, warm
from benchmarks.programs import Fit
from benchmarks.programs.ours import fit_under
from keras_strategy.commands import info

# Other processes' share of the machine from which a measured ratio is unreliable.
_MAX_OTHER_LOAD = 0.05
_TEXT = """\
Keras {keras} on {backend}; {machine}
An MLP of {weights:,} weights, Adam, {batch_size} rows a step; {rounds} rounds of
{steps} steps, in turn

  Keras alone       {keras_alone:10.1f} steps per second
  MirroredStrategy  {with_strategy:10.1f} on {devices}
  ratio             {ratio:10.2f} (quartiles {quartiles[0]:.2f} to {quartiles[1]:.2f})

Other processes took {others:.0%} of the machine"""


def main(args: Sequence[str] | None = None) -> int:
    """Measure, and print the speeds and their ratio; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_devices")
    add = parser.add_argument
    add("--devices", type=int, help="logical CPU devices (default: all of one kind)")
    add("--units", type=int, default=256, help="width of the two hidden layers")
    add("--batch-size", type=int, default=1024, help="rows of the global batch")
    add("--rounds", type=int, default=9, help="how often each is timed")
    add("--seconds", type=float, default=0.25, help="approximate time of each")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    try:
        result = measure(options)
    except (RuntimeError, ValueError) as error:  # no such devices, or no such backend
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    text = _TEXT.format(**{**result, "devices": ", ".join(result["devices"])})
    is_quiet = result["others"] < _MAX_OTHER_LOAD
    print(text + ("." if is_quiet else ": measure again on an idle machine."))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure by the command line's options; return the result and its conditions."""
    strategy, ours, alone = create_programs(
        options.devices, options.units, options.batch_size
    )
    turns = turn_of(ours), turn_of(alone)
    steps = warm(*turns, options.seconds)
    load, begin = OtherLoad(), time.process_time()
    speed = compare(*turns, steps, options.rounds).speeds[WALL]
    other_load = load.share(time.process_time() - begin)
    versions = info.data()
    return {
        **{name: versions[name] for name in ("keras_strategy", "keras", "backend")},
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "devices": list(strategy.extended.worker_devices),
        "weights": ours.model.count_params(),
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "steps": steps,
        "keras_alone": speed.peer,
        "with_strategy": speed.ours,
        "ratio": speed.ratio,
        "quartiles": list(speed.spread),
        "others": other_load,
    }


def create_programs(
    count: int | None, units: int, batch: int
) -> tuple[ks.Strategy, Fit, Fit]:
    """Return a strategy of so many devices, `fit` on it, and `fit` of Keras alone."""
    random = np.random.default_rng(0)
    x = random.normal(size=(batch, 64)).astype("float32")
    y = random.integers(0, 10, batch).astype("int32")
    case = Case("random", functools.partial(build_mlp, units), lambda: (x, y), batch)
    devices, scope = None, contextlib.nullcontext
    if count is not None:
        ks.config.set_logical_devices("cpu", count)
        devices = [f"cpu:{index}" for index in range(count)]
        # Where there are GPUs, Keras alone would otherwise train on one.
        scope = functools.partial(keras.device, "cpu")
    strategy = ks.MirroredStrategy(devices)
    ours = fit_under(strategy, case)
    with scope():
        alone = Fit(case.compiled(), case, scope=scope)
    return strategy, ours, alone


if __name__ == "__main__":
    sys.exit(main())
