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
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.paired_timing import WALL, OtherLoad, Turn, compare, warm
from keras_strategy.commands import info

_INPUTS, _CLASSES = 64, 10
# Other processes' share of the machine from which a measured ratio is unreliable.
_MAX_OTHER_LOAD = 0.05
_TEXT = """\
Keras {keras} on {backend}; {machine}
A model of {weights:,} weights ({model}), Adam, {batch_size} rows a step;
{rounds} rounds of {steps} steps, in turn

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
    is_quiet = result["others"] < _MAX_OTHER_LOAD
    text = _TEXT.format(**{**result, "devices": ", ".join(result["devices"])})
    print(text + ("." if is_quiet else ": measure again on an idle machine."))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure by the command line's options; return the result and its conditions."""
    devices = None
    if options.devices is not None:
        ks.config.set_logical_devices("cpu", options.devices)
        devices = [f"cpu:{index}" for index in range(options.devices)]
    strategy = ks.MirroredStrategy(devices)
    with strategy.scope():
        ours = _model(options.units)
    # Where there are GPUs, Keras alone would otherwise train on one.
    on_cpu = devices is not None
    with _device_scope(on_cpu):
        alone = _model(options.units)
    size = options.batch_size
    turns = _turn(ours, size, False), _turn(alone, size, on_cpu)
    steps = warm(*turns, options.seconds)
    load, begin = OtherLoad(), time.process_time()
    speed = compare(*turns, steps, options.rounds).speeds[WALL]
    other_load = load.share(time.process_time() - begin)
    versions = info.data()
    return {
        **{name: versions[name] for name in ("keras_strategy", "keras", "backend")},
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "devices": list(strategy.extended.worker_devices),
        "model": f"{_INPUTS} - {options.units} - {options.units} - {_CLASSES}",
        "weights": ours.count_params(),
        "batch_size": size,
        "rounds": options.rounds,
        "steps": steps,
        "keras_alone": speed.peer,
        "with_strategy": speed.ours,
        "ratio": speed.ratio,
        "quartiles": list(speed.spread),
        "others": other_load,
    }


# A short and a long turn alternate.
@functools.lru_cache(maxsize=2)
def _make_batches(batch_size: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and classes, the same batch in every step."""
    random = np.random.default_rng(0)
    x = random.normal(size=(batch_size, _INPUTS)).astype("float32")
    y = random.integers(0, _CLASSES, batch_size).astype("int32")
    return np.tile(x, (steps, 1)), np.tile(y, steps)


def _model(units: int) -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(units, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((_INPUTS,)), *hidden, layers.Dense(_CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def _device_scope(on_cpu: bool) -> AbstractContextManager[Any]:
    return keras.device("cpu") if on_cpu else contextlib.nullcontext()


def _turn(model: keras.Model, batch_size: int, on_cpu: bool) -> Turn:
    def train(steps: int) -> dict[str, float]:
        x, y = _make_batches(batch_size, steps)
        begin = time.perf_counter()
        with _device_scope(on_cpu):
            model.fit(x, y, batch_size=batch_size, verbose=0)
        return {WALL: time.perf_counter() - begin}

    return train


if __name__ == "__main__":
    sys.exit(main())
