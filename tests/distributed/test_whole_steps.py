"""Steps of several workers that cannot be split by rows equal one device's."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance import models
from conformance.compare import scope, train
from keras_strategy.audit.policy import kinds_that_run_whole
from keras_strategy.core.registry import get_engine
from tests.audit.whole_programs import PROGRAMS
from tests.distributed.local_rows_jobs import UNEQUAL, joined, of_workers, own_of
from tests.distributed.test_training import equal

BACKEND = keras.backend.backend()
# JAX splits no step of `fit` without virtual replicas.
OPTIONS = {"virtual_replicas": 4} if BACKEND == "jax" else {}
NAMES = [
    name
    for name in (
        *("functional ops", "centers", "hardest rows", "pairs", "accumulator"),
        *("divided loss", "mean of replicas"),
    )
    if BACKEND != "jax" or PROGRAMS[name].is_traceable
]
# By batches of 8 the workers have 2 and 1 of the last rows.
ROWS = 19


def make_strategy(alone: bool) -> Any:
    return None if alone else ks.MultiWorkerMirroredStrategy(**OPTIONS)


def train_programs(alone: bool = False) -> dict[str, Any]:
    """Train programs on arrays, of which each worker reads its rows."""
    found = {}
    for name in NAMES:
        program = PROGRAMS[name]
        arguments = program.arguments
        for key in ("x", "y"):
            arguments[key] = arguments[key][:ROWS]
        trained = train(make_strategy(alone), program.make, **arguments)
        found[name] = {
            "weights": [*trained.weights, *trained.optimizer],
            "logs": trained.logs,
            "predictions": trained.predictions,
        }
        whole = kinds_that_run_whole(trained.model)
        expected = set() if program.gathers else set(program.kinds.split())
        assert alone or whole == expected or BACKEND == "jax", (name, whole)
    return found


def train_own_rows(alone: bool = False) -> dict[str, Any]:
    """Train, evaluate and predict on rows of each worker's own."""
    keras.utils.set_random_seed(1)
    strategy, steps = make_strategy(alone), of_workers(UNEQUAL, 2, models.regression)
    with scope(strategy):
        model = PROGRAMS["functional ops"].make()
    x: Any = joined(steps)
    if strategy is not None:
        off = ks.InputOptions(auto_shard_policy="OFF")
        reads = own_of(steps, strategy.extended.cluster.rank)
        x = strategy.experimental_distribute_dataset(reads, off)
    history = model.fit(x, epochs=2, shuffle=False, verbose=0).history
    found = {
        "weights": model.get_weights(),
        "logs": history,
        "evaluated": model.evaluate(x, verbose=0),
    }
    predictions = model.predict(x, verbose=0)
    if not alone:
        return {**found, "predictions": predictions}
    counts = [len(rows[0]) for step in steps for rows in step]
    parts = np.split(predictions, np.cumsum(counts)[:-1])
    by_worker = [np.concatenate(parts[rank::2]) for rank in range(2)]
    return {**found, "predictions": by_worker}


pytestmark = pytest.mark.skipif(
    BACKEND == "jax" and get_engine().virtual_replicas_unsupported_reason() is not None,
    reason="`fit` is one program",
)


def test_workers_equal_one_device(in_turns):
    calls = {"programs": (train_programs, {}), "own": (train_own_rows, {})}
    found, printed = in_turns(**calls)
    programs, own = train_programs(alone=True), train_own_rows(alone=True)
    by_worker = own.pop("predictions")
    for rank in range(2):
        for name in NAMES:
            assert equal(found["programs"][rank][name], programs[name], 2e-5), name
        expected = {**own, "predictions": by_worker[rank]}
        assert equal(found["own"][rank], expected, 2e-5)
    # The chief warns, once for each function.
    text = "results are exact"
    counts = [sum(text in line for line in x.splitlines()) for x in printed]
    programs = [PROGRAMS[name] for name in NAMES]
    if BACKEND == "jax":  # whose calls are not recorded, so no part gathers
        assert counts == [sum(len(x.kinds.split()) for x in programs) + 3, 0]
    else:  # a part that gathers serves all functions
        numbers = [1 if x.gathers else len(x.kinds.split()) for x in programs]
        assert counts == [sum(numbers) + 1, 0]
