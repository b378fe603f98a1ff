"""A model whose arithmetic is a sleep of known length, and the times of its steps.

Workers that share cores then share only what communication needs of them.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

import keras_strategy as ks
from benchmarks import torch_ours, torch_peers
from benchmarks.cases import Case
from benchmarks.network import worker
from benchmarks.programs import Train
from benchmarks.scaling.worker import measure_all_reduce, time_call
from tests.distributed.machines import Machine

BLOCKS = 8
UNITS = 512
ROWS = 8  # of each worker
SECONDS = 1.0  # of a step's computation
GRADIENT_BYTES = BLOCKS * 4 * UNITS * (UNITS + 1)
# The backward pass is two thirds of a step, and has gradients to send after a block.
OVERLAP = 2 / 3 * (BLOCKS - 1) / BLOCKS
# Bytes of the arrays that are summed.
SIZES = (65_536, 1_048_576, 4_194_304)
_PER_ROW = SECONDS / BLOCKS / ROWS


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * _PER_ROW / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(len(gradients[0]) * _PER_ROW * 2 / 3)
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


def ddp_by_hand(case: Case) -> Train:
    """Train by a loop over the same model under DistributedDataParallel."""
    return torch_peers.keras_under_ddp(case, bucket_cap_mb=1)  # as of ours


PROGRAMS: dict[str, Callable[[Case], Train]] = {
    "ours": torch_ours.workers_fit_during_backward,
    "DDP": ddp_by_hand,
}


def measure_step(name: str, machines: Sequence[Machine]) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes that this worker sends in it."""
    worker.join(machines, is_peer=name == "DDP")
    train = PROGRAMS[name](Case("emulated", _build, _load, ROWS * len(machines)))
    train(4)  # overlap begins with the third step
    before = _sent()
    train(2)
    sent = (_sent() - before) / 2
    return time_call(train, 1, 3, rounds=3), sent


def _sent() -> int:
    # Of this thread's machine: each interface has 8 figures of receiving before.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (figures,) = (line.split(":")[1] for line in lines if "eth0:" in line)
    return int(figures.split()[8])


def measure_link(machines: Sequence[Machine]) -> dict[int, float]:
    """Return the seconds of sums between the machines, by the bytes of an array."""
    worker.join(machines, is_peer=False)
    strategy = ks.MultiWorkerMirroredStrategy()
    return {size: measure_all_reduce(strategy, size) for size in SIZES}
