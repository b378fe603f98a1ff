"""What `keras-strategy bench` measures: a strategy beside Keras alone, in one process.

Both train the same model on the same rows by `fit`, in turn.
"""

import argparse
import contextlib
import os
import platform
import time
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from keras_strategy.launch import info
from keras_strategy.launch.paired_timing import WALL, OtherLoad, Turn, compare, warm

_INPUTS, _CLASSES = 64, 10


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, and tells what it was of.

    Args:
        options: Those of the command line.
    """
    devices = None
    if options.devices is not None:
        ks.config.set_logical_devices("cpu", options.devices)
        devices = [f"cpu:{index}" for index in range(options.devices)]
    strategy = ks.MirroredStrategy(devices)
    names = strategy.extended.worker_devices
    rows = _Rows(options.batch_size)
    with strategy.scope():
        ours = _model(options.units)
    # Where there are GPUs, Keras alone would else train on one.
    on_cpu = devices is not None
    with _on(on_cpu):
        alone = _model(options.units)
    sides = _turn(ours, rows, False), _turn(alone, rows, on_cpu)
    steps = warm(*sides, options.seconds)
    others, used = OtherLoad(), time.process_time()
    speed = compare(*sides, steps, options.rounds).speeds[WALL]
    share = others.share(time.process_time() - used)
    about = info.data()
    return {
        **{name: about[name] for name in ("keras_strategy", "keras", "backend")},
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "devices": list(names),
        "model": f"{_INPUTS} - {options.units} - {options.units} - {_CLASSES}",
        "weights": ours.count_params(),
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "steps": steps,
        "keras_alone": speed.peer,
        "with_strategy": speed.ours,
        "ratio": speed.ratio,
        "quartiles": list(speed.spread),
        "others": share,
    }


class _Rows:
    """Numbers that look like data; as many batches as are asked for."""

    def __init__(self, batch_size: int):
        random = np.random.default_rng(0)
        self._batch_size = batch_size
        self._x = random.normal(size=(batch_size, _INPUTS)).astype("float32")
        self._y = random.integers(0, _CLASSES, batch_size).astype("int32")

    def of(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self._y) < steps * self._batch_size:
            index = np.arange(steps * self._batch_size) % len(self._y)
            self._x, self._y = self._x[index], self._y[index]
        count = steps * self._batch_size
        return self._x[:count], self._y[:count]


def _model(units: int) -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(units, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((_INPUTS,)), *hidden, layers.Dense(_CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def _on(cpu: bool) -> AbstractContextManager[Any]:
    return keras.device("cpu") if cpu else contextlib.nullcontext()


def _turn(model: keras.Model, rows: _Rows, on_cpu: bool) -> Turn:
    def train(steps: int) -> dict[str, float]:
        x, y = rows.of(steps)
        begin = time.perf_counter()
        with _on(on_cpu):
            model.fit(x, y, batch_size=len(y) // steps, verbose=0)
        return {WALL: time.perf_counter() - begin}

    return train
