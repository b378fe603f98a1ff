"""The rows of the equality table with a process for each replica."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras_strategy as ks
from conformance.compare import Trained
from conformance.equality.__main__ import run
from conformance.equality.cases import Case, all_cases
from keras_strategy.testing import WorkerRunner

# A trained row by its name and its number of rows, or the error that it raised.
Results = dict[tuple[str, int], Trained | Exception]


def run_rows(
    names: Sequence[str], numbers: Sequence[int], options: dict[str, Any]
) -> Results:
    """Train rows as one of several workers."""
    strategy = ks.MultiWorkerMirroredStrategy(**options)
    results: Results = {}
    for case in all_cases():
        for rows in numbers if case.name in names else ():
            try:
                trained = run(case, rows, strategy)
                results[case.name, rows] = dataclasses.replace(trained, model=None)
            except Exception as error:
                results[case.name, rows] = RuntimeError(f"{error}")
    return results


def train_with_processes(
    names: Sequence[str],
    numbers: Sequence[int],
    workers: int,
    shard: str | None = None,
    virtual_replicas: int | None = None,
) -> Callable[[Case, int], Trained]:
    """Train rows in processes of one device each, and return the chief's results."""
    options = {"shard": shard, "virtual_replicas": virtual_replicas}
    arguments = list(names), list(numbers), options
    with WorkerRunner(workers, timeout_seconds=3600) as runner:
        found = runner.run(run_rows, *arguments)[0]

    def result(case: Case, rows: int) -> Trained:
        trained = found[case.name, rows]
        if isinstance(trained, Exception):
            raise trained
        return trained

    return result
