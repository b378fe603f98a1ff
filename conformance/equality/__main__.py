"""Prints the equality table of the backend in use.

Each row trains one model on one device and on 2, 3 and 4 replicas, with numbers of
rows whose last batch splits unevenly, has one row, or leaves replicas empty. The
column "native" is what Keras does without this package: keras.distribution on JAX,
tf.distribute.MirroredStrategy on TensorFlow.
"""

import argparse
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

import keras

import keras_strategy as ks
from conformance.compare import Trained, differences, train
from conformance.equality.cases import Case, all_cases, random
from keras_strategy.core.registry import get_engine

BATCH = 8
# The last batch of 8 has 5 rows, 1 row, 2 rows.
ROWS = (21, 17, 18)


def run(
    case: Case,
    rows: int,
    strategy=None,
    predicted: int | None = None,
    eagerly: bool = False,
) -> Trained:
    """Trains a case under a strategy, or on one device, and predicts for some rows."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(case.policy)
    try:
        x, y = case.data(rows)
        how = {"predicted": predicted, "eagerly": eagerly, **case.fit(rows)}
        return train(strategy, case.make, x, y, BATCH, **how)
    finally:
        keras.config.set_dtype_policy(previous)


@functools.cache
def mirrored(replicas: int, shard: str | None = None) -> ks.MirroredStrategy:
    """Return the strategy of a number of logical CPUs."""
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], shard=shard)


def cell(
    case: Case,
    many: Callable[[Case, int], Trained],
    ones: dict[int, Trained],
    numbers: Sequence[int] = ROWS,
) -> tuple[str, bool]:
    """Return the text of one cell, and True if it is within the tolerances.

    Args:
        case: The row of the table.
        many: Trains it with a number of rows on several devices.
        ones: The trainings on one device by rows, kept for the next cell.
        numbers: The numbers of rows.
    """
    worst = (0.0, 0.0, 0.0)
    try:
        for rows in numbers:
            if rows not in ones:
                ones[rows] = run(case, rows)
            found = differences(ones[rows], many(case, rows))
            weights = max(found["weights"], found["optimizer"])
            new = (weights, found["logs"], found["predictions"])
            worst = tuple(map(max, worst, new))
    except Exception as error:
        # A row that fails is part of the answer; the others are still asked.
        first = str(error).strip().splitlines()[:1]
        print(f"{case.name}: {type(error).__name__}: {first}", file=sys.stderr)
        return type(error).__name__, False
    good = all(a <= b for a, b in zip(worst, tolerances(case), strict=True))
    return f"{written(worst)}{'' if good else ' (!)'}", good


def tolerances(case: Case) -> tuple[float, float, float]:
    """Return the tolerances of weights, logs and predictions."""
    return case.weights, case.logs, case.predictions


def written(numbers: tuple[float, ...]) -> str:
    """Return the text of differences or tolerances."""
    return " / ".join(f"{number:.0e}" for number in numbers)


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def select(cases: Iterable[Case], only: str) -> list[Case]:
    """Return the cases whose name contains one of several texts, `this|that`."""
    return [c for c in cases if any(text in c.name for text in only.split("|"))]


def _names(text: str) -> list[str | None]:
    return [None if name == "none" else name for name in text.split(",")]


def main() -> int:
    """Print the table and return 1 if a row does not equal one device."""
    parser = argparse.ArgumentParser(prog="python -m conformance.equality")
    add = parser.add_argument
    add("--replicas", default=(2, 3, 4), type=parse_numbers, help="such as 2,3,4")
    add("--only", default="", help="rows whose name contains this, or that|if so given")
    add("--random", action="store_true", help="layers that draw alone")
    add("--rows", default=ROWS, type=parse_numbers, help="such as 21,17,18")
    add("--shard", default=(None,), type=_names, help="such as none,optimizer")
    add("--processes", action="store_true", help="one per replica")
    add("--native", action="store_true", help="the peer's column too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    backend = keras.backend.backend()
    counts = options.replicas
    ks.config.set_logical_devices("cpu", max(counts))
    devices = tuple(f"cpu:{i}" for i in range(counts[0]))
    peer = get_engine().native_strategy(devices) if options.native else None
    ways = [(n, shard) for shard in options.shard for n in counts]
    columns = [*(f"N = {n}{f', {s}' if s else ''}" for n, s in ways), "tolerance"]
    if peer is not None:
        columns.insert(-1, f"native, N = {counts[0]}")

    def native_run(case, rows):
        assert peer is not None
        with peer.scope():
            return run(case, rows)

    print(f"Keras {keras.__version__}, {backend}: largest difference from one device")
    print("in weights / in logs / in predictions\n")
    print(f"| row | {' | '.join(columns)} |")
    print("| --- |" + " --- |" * len(columns), flush=True)
    passed = failed = 0
    cases = select(random.each() if options.random else all_cases(), options.only)
    if options.processes:
        workers = importlib.import_module("conformance.equality.workers")
        names = [case.name for case in cases if backend not in case.not_on]
        trainers = [
            workers.train_with_processes(names, options.rows, n, s) for n, s in ways
        ]
    else:
        trainers = [
            lambda case, rows, n=n, s=s: run(case, rows, mirrored(n, s))
            for n, s in ways
        ]
    for case in cases:
        if backend in case.not_on:
            print(f"| {case.name} | {case.not_on[backend]} |", flush=True)
            continue
        ones: dict = {}
        cells = [cell(case, trainer, ones, options.rows) for trainer in trainers]
        good = all(ok for _, ok in cells)
        passed, failed = passed + good, failed + (not good)
        texts = [text for text, _ in cells]
        if peer is not None:
            texts.append(cell(case, native_run, ones, options.rows)[0])
        texts.append(written(tolerances(case)))
        print(f"| {case.name} | {' | '.join(texts)} |", flush=True)
    print(f"\n{passed} rows equal one device, {failed} do not")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
