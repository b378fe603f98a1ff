"""Measurement of `keras-strategy bench`: a strategy against Keras alone.

Both train the same model on the same rows with `fit`, in turn, in one process.
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
    """Measure by the command line's options; return the result and its conditions."""
    devices = None
    if options.devices is not None:
        ks.config.set_logical_devices("cpu", options.devices)
        devices = [f"cpu:{index}" for index in range(options.devices)]
    strategy = ks.MirroredStrategy(devices)
    data = _Data(options.batch_size)
    with strategy.scope():
        ours = _model(options.units)
    # Where there are GPUs, Keras alone would otherwise train on one.
    on_cpu = devices is not None
    with _device_scope(on_cpu):
        alone = _model(options.units)
    turns = _turn(ours, data, False), _turn(alone, data, on_cpu)
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
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "steps": steps,
        "keras_alone": speed.peer,
        "with_strategy": speed.ours,
        "ratio": speed.ratio,
        "quartiles": list(speed.spread),
        "others": other_load,
    }


class _Data:
    """Random inputs and classes, grown to the number of batches requested."""

    def __init__(self, batch_size: int):
        random = np.random.default_rng(0)
        self._batch_size = batch_size
        self._x = random.normal(size=(batch_size, _INPUTS)).astype("float32")
        self._y = random.integers(0, _CLASSES, batch_size).astype("int32")

    def batches(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        count = steps * self._batch_size
        if len(self._y) < count:
            index = np.arange(count) % len(self._y)
            self._x, self._y = self._x[index], self._y[index]
        return self._x[:count], self._y[:count]


def _model(units: int) -> keras.Model:
    layers = keras.layers
    hidden = [layers.Dense(units, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((_INPUTS,)), *hidden, layers.Dense(_CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def _device_scope(on_cpu: bool) -> AbstractContextManager[Any]:
    return keras.device("cpu") if on_cpu else contextlib.nullcontext()


def _turn(model: keras.Model, data: _Data, on_cpu: bool) -> Turn:
    def train(steps: int) -> dict[str, float]:
        x, y = data.batches(steps)
        begin = time.perf_counter()
        with _device_scope(on_cpu):
            model.fit(x, y, batch_size=len(y) // steps, verbose=0)
        return {WALL: time.perf_counter() - begin}

    return train
