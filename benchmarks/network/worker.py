"""A worker of the comparison: `fit` with and without callbacks, and its times."""

import dataclasses
import os
from collections.abc import Sequence

import keras

import keras_strategy as ks
from benchmarks.cases import CASES, Case
from benchmarks.ours import fit_in_scope
from benchmarks.programs import Train
from benchmarks.scaling.worker import time_call
from benchmarks.side import program_named
from tests.distributed.machines import Machine, join_as_worker

PORT = 29_400
CASE = dataclasses.replace(CASES[0], batch=96)


class Counter(keras.callbacks.Callback):
    """Counts the epochs."""

    epochs = 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.epochs += 1


class Reader(keras.callbacks.Callback):
    """Keeps the loss of the last batch."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.loss = (logs or {})["loss"]


def fit(case: Case, callbacks: Sequence[keras.callbacks.Callback] = ()) -> Train:
    return fit_in_scope(ks.MultiWorkerMirroredStrategy(), case, callbacks=callbacks)


def fit_with_callback(case: Case) -> Train:
    return fit(case, [Counter()])


def fit_with_reader(case: Case) -> Train:
    return fit(case, [Reader()])


def join(machines: Sequence[Machine], is_peer: bool) -> None:
    """Enter this worker's machine, for a peer with the variables of torchrun."""
    rank = join_as_worker([machine.address for machine in machines], machines)
    if is_peer:
        os.environ.update(
            MASTER_ADDR=machines[0].address,
            MASTER_PORT=str(PORT),
            RANK=str(rank),
            WORLD_SIZE=str(len(machines)),
            GLOO_SOCKET_IFNAME="eth0",
        )


def time_step(program: str, machines: Sequence[Machine]) -> float:
    """Return the seconds of a step of this worker, in its machine."""
    join(machines, is_peer=not program.startswith("network."))
    train = program_named(program)(CASE)
    return time_call(train, 5, 25, rounds=3)
