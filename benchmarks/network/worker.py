"""One of several workers on simulated machines, and the time of its step."""

import dataclasses
import os
from collections.abc import Sequence

import keras

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import MLP, WORKERS
from benchmarks.paired_processes import torchrun_variables
from benchmarks.paired_timing import seconds_per_call
from benchmarks.program_process import find_function
from benchmarks.programs import Train
from benchmarks.programs.ours import fit_under
from tests.distributed.machines import Machine, join_as_worker

PORT = 29_400
CASE = dataclasses.replace(CASES[MLP], batch=96)


class EpochCounter(keras.callbacks.Callback):
    """Counts the epochs."""

    epochs = 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.epochs += 1


class LossReader(keras.callbacks.Callback):
    """Keeps the loss of the last batch."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.loss = (logs or {})["loss"]


# Callbacks of our `fit`, by the names of the table.
CALLBACKS = {
    "fit": [],
    "with a callback for epochs": [EpochCounter()],
    "for batches": [LossReader()],
}
PEERS = {
    "torch": ("torch_loops:module_loop", {}),
    "jax": ("keras_alone:data_parallel_fit_of_workers", {}),
    "tensorflow": ("tensorflow_loops:native_loop", {"name": WORKERS}),
}


def join(machines: Sequence[Machine], is_peer: bool) -> None:
    """Enter this worker's machine, for a peer with the variables of torchrun."""
    rank = join_as_worker([machine.address for machine in machines], machines)
    if is_peer:
        place = rank, len(machines), machines[0].address, PORT
        os.environ.update(torchrun_variables(*place), GLOO_SOCKET_IFNAME="eth0")


def time_step(name: str, machines: Sequence[Machine]) -> float:
    """Return the seconds of a step of "peer" or of a `fit` of ours."""
    join(machines, is_peer=name == "peer")
    if name == "peer":
        function, options = PEERS[keras.backend.backend()]
        train: Train = find_function(f"programs.{function}")(CASE, **options)
    else:
        strategy = ks.MultiWorkerMirroredStrategy()
        train = fit_under(strategy, CASE, callbacks=CALLBACKS[name])
    return seconds_per_call(train, 5, 25, rounds=3)
