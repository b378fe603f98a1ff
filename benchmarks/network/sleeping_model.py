"""A model whose arithmetic is a sleep of known length, and the times of its steps.

Workers that share cores then share only what communication needs of them.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

import keras_strategy as ks
from benchmarks.cases import Case
from benchmarks.comparisons import WORKERS
from benchmarks.network.worker import join
from benchmarks.paired_timing import seconds_per_call
from benchmarks.programs import Train, ours, torch_loops
from benchmarks.scaling.measurements import measure_all_reduce
from tests.distributed.machines import Machine

BLOCKS = 8
UNITS = 512
ROWS = 8  # of each worker
SECONDS = 1.0  # of a step's computation
GRADIENT_BYTES = BLOCKS * 4 * UNITS * (UNITS + 1)
# The backward pass is two thirds of a step, and has gradients to send after a block.
OVERLAP = 2 / 3 * (BLOCKS - 1) / BLOCKS
PROGRAMS = ("ours", "DDP")
# Bytes of the arrays that are summed.
SIZES = (65_536, 1_048_576, 4_194_304)
_ROW_SECONDS = SECONDS / BLOCKS / ROWS


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * _ROW_SECONDS / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(len(gradients[0]) * _ROW_SECONDS * 2 / 3)
        return gradients[0]


class Sleep(keras.layers.Layer):
    """Sleeps for each row, a third of the time forward and two thirds backward."""

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x)

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


def _build() -> keras.Model:
    layers = [keras.Input((UNITS,))]
    for _ in range(BLOCKS):
        layers += [keras.layers.Dense(UNITS), Sleep()]
    return keras.Sequential(layers)


def _load() -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).random((64, UNITS), "float32")
    return rows, np.arange(64, dtype="int32")


def measure_step(name: str, machines: Sequence[Machine]) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes that this worker sends in it."""
    join(machines, is_peer=name == "DDP")
    case = Case("sleep", _build, _load, ROWS * len(machines))
    if name == "DDP":
        train: Train = torch_loops.keras_loop(case, bucket_cap_mb=1)
    else:
        train = ours.fit(case, WORKERS, communication={"bytes_per_pack": 1 << 20})
    train(4)  # overlap begins with the third step
    before = _sent_bytes()
    train(2)
    sent = (_sent_bytes() - before) / 2
    return seconds_per_call(train, 1, 3, rounds=3), sent


def _sent_bytes() -> int:
    # Of this thread's machine: each interface has 8 figures of receiving before.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (figures,) = (line.split(":")[1] for line in lines if "eth0:" in line)
    return int(figures.split()[8])


def measure_link(machines: Sequence[Machine]) -> dict[int, float]:
    """Return the seconds of sums between the machines, by the bytes of an array."""
    join(machines, is_peer=False)
    strategy = ks.MultiWorkerMirroredStrategy()
    return {size: measure_all_reduce(strategy, size) for size in SIZES}
