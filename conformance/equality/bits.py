"""Prints whether the rows of the equality table have the same bits on other devices.

Each row trains one model with virtual replicas: on devices of one process, and in
processes of one device each. Its weights, optimizer variables, logs and predictions are
compared.
"""

import argparse
import functools
import hashlib
import sys
import warnings
from collections.abc import Callable, Sequence

import keras
import numpy as np

import keras_strategy as ks
from conformance.compare import Trained
from conformance.equality.__main__ import parse_numbers, run, select
from conformance.equality.cases import Case, all_cases
from conformance.equality.workers import train_with_processes

ROWS = 21  # the last batch of 8 has 5 rows


def digest(trained: Trained) -> str:
    """Return the digest of all bits that a training leaves behind."""
    found = hashlib.sha256()
    for array in keras.tree.flatten(
        [trained.weights, trained.optimizer, trained.logs, trained.predictions]
    ):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def train_here(devices: int, virtual_replicas: int, case: Case, rows: int) -> Trained:
    """Trains a row on devices of this process."""
    cpus = [f"cpu:{i}" for i in range(devices)]
    strategy = ks.MirroredStrategy(cpus, virtual_replicas=virtual_replicas)
    return run(case, rows, strategy)


def cell(train: Callable[[], Trained]) -> str:
    """Return the first digits of a training's digest, or its error."""
    try:
        return digest(train())[:8]
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return 1 if the bits of a row differ."""
    parser = argparse.ArgumentParser(prog="python -m conformance.equality.bits")
    add = parser.add_argument
    add("--virtual-replicas", type=int, default=12)
    add("--devices", default=[1], type=parse_numbers, help="such as 1,2,3,4,6")
    workers = {"default": [2, 3, 4, 6], "help": 'such as 2,3,4,6, or ""'}
    add("--workers", type=parse_numbers, **workers)
    add("--only", default="", help="rows whose name contains this")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")

    backend, virtual = keras.backend.backend(), options.virtual_replicas
    devices, numbers = options.devices, options.workers
    ks.config.set_logical_devices("cpu", max(devices))
    cases = [c for c in select(all_cases(), options.only) if backend not in c.not_on]
    names = [case.name for case in cases]
    trainers = [functools.partial(train_here, n, virtual) for n in devices]
    trainers += [
        train_with_processes(names, [ROWS], n, virtual_replicas=virtual)
        for n in numbers
    ]
    columns = [f"{n} devices" for n in devices] + [f"{n} workers" for n in numbers]
    print(
        f"| V = {virtual} | {' | '.join(columns)} |\n| ---{' | ---' * len(columns)} |"
    )
    different = 0
    for case in cases:
        cells = [cell(functools.partial(of, case, ROWS)) for of in trainers]
        is_same = len(set(cells)) == 1
        different += not is_same
        mark = "" if is_same else " (!)"
        print(f"| {case.name} | {' | '.join(cells)}{mark} |", flush=True)
    print(f"\n{len(cases) - different} rows have the same bits, {different} do not")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
