"""Measurements of one of several workers: steps, sums, and rows of a slow source."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.cases import CASES, Case
from benchmarks.comparisons import EMBEDDING, MLP, TRANSFORMER
from benchmarks.paired_timing import seconds_per_call
from benchmarks.programs.ours import fit_under

# Bytes of the arrays that are summed.
SIZES = (4_096, 65_536, 1_048_576, 4_194_304)
# A row takes that long to read, as from a network.
ROW_SECONDS = 0.005


def measure_worker(workers: int) -> dict[str, Any]:
    """Return the measurements of one of so many workers."""
    strategy: Any = ks.OneDeviceStrategy("cpu:0")
    if workers > 1:
        strategy = ks.MultiWorkerMirroredStrategy()
    return {
        "steps": {
            name: {
                "seconds": _measure_step(strategy, CASES[name]),
                "gradients": 4 * CASES[name].build().count_params(),
            }
            for name in (TRANSFORMER, EMBEDDING)
        },
        "all_reduce": {n: measure_all_reduce(strategy, n) for n in SIZES},
        "input": {n: _measure_input(strategy, n) for n in (0, 2)},
    }


def _measure_step(strategy: ks.Strategy, case: Case) -> float:
    """Return the seconds of a step of `fit`, with the case's batch for each worker."""
    batch = case.batch * strategy.num_replicas_in_sync
    train = fit_under(strategy, dataclasses.replace(case, batch=batch))
    return seconds_per_call(train, 5, 25)


def measure_all_reduce(strategy: ks.Strategy, size: int) -> float:
    """Return the seconds of a sum over the workers of an array of so many bytes."""
    if strategy.num_replicas_in_sync == 1:
        return 0.0
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(size // 4, "float32")
    )

    def summed(x):
        return ks.get_replica_context().all_reduce("SUM", x)

    def same(x):
        return x * 1.0

    def runs(function: Callable) -> Callable[[int], Any]:
        def call(count):
            for _ in range(count):
                result = strategy.run(function, args=(values,))
            # Waits for the device.
            (local,) = strategy.experimental_local_results(result)
            return keras.ops.convert_to_numpy(local)

        return call

    alone = seconds_per_call(runs(same), 5, 25)
    return seconds_per_call(runs(summed), 5, 25) - alone


class _SlowRows:
    def __init__(self, case: Case, rows: int) -> None:
        self._x, self._y = case.rows(rows)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(ROW_SECONDS)
        return self._x[index], self._y[index]


def _measure_input(strategy: ks.Strategy, threads: int) -> float:
    """Return the rows per second of all workers, each of which reads with threads."""
    case, batch = CASES[MLP], 32  # rows of all workers
    with strategy.scope():
        model = case.compiled()

    def train(steps):
        rows = _SlowRows(case, steps * batch)
        data = ks.IndexedDataset(rows, batch, shuffle=True, threads=threads)
        model.fit(data, verbose=0)

    return batch / seconds_per_call(train, 4, 12, rounds=3)
