"""Each worker trains on the rows that it has read, and none of them travel.

On JAX they do in a step of unequal rows, which a program of XLA's cannot have.
"""

import importlib.util

import keras
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import local_rows_jobs as jobs
from tests.distributed.jobs import in_turns
from tests.distributed.test_training import equal

BACKEND = keras.backend.backend()


def rows_of(table, rank):
    return sum(rows[rank] for rows in table)


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize(
    ("count", "devices", "name"),
    [(2, 1, "equal"), (3, 1, "unequal"), (2, 2, "unequal")],
    ids=["2x1", "3x1", "2x2"],
)
def test_local_rows_give_one_devices_weights(starter, count, devices, name):
    """Equal rows on two workers; several devices of each have some in test_tpu.py."""
    calls = {"own": (jobs.of_tables, {"tables": [name], "workers": count})}
    shares = count == 3 and importlib.util.find_spec("torch")
    if shares:
        # What 2 workers do with sources that all have is in test_input.py.
        calls["shared"] = (jobs.of_sources, {})
    with WorkerRunner(count, devices, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(in_turns, calls)
    if shares:
        shared = [result["shared"] for result in results]
        assert equal(shared, [jobs.of_sources(alone=True)] * count, 2e-5)
    (want,) = jobs.of_tables([name], count, alone=True)
    for rank, of_worker in enumerate(results):
        (got,) = of_worker["own"]
        own = {rank: want["same"]["predicted"][rank]}
        assert equal(got["same"], {**want["same"], "predicted": own}, 2e-5)
        assert got["rows"] == 2 * rows_of(jobs.TABLES[name], rank)  # in two epochs
        assert got["steps"] == [sum(step[:count]) for step in jobs.TABLES[name]]
        travels = name == "unequal" and BACKEND == "jax"
        assert (got["gathered"] != []) == travels


@pytest.mark.full(keep_on="tensorflow")
def test_local_datasets_resume(two_workers):
    for result in two_workers.run(jobs.goes_on):
        (expected, indexed), (expected_own, own) = result
        assert expected == indexed and len(indexed) == 2
        # Until the worker that has most has no more.
        assert expected_own == own and len(own) == 3


@pytest.mark.full(keep_on="torch")
def test_fit_with_local_rows_in_many_ways(two_workers):
    expected = jobs.ways_to_fit(alone=True)
    for result in two_workers.run(jobs.ways_to_fit):
        assert equal(result["weights"], expected["weights"], 2e-5)
        # When an epoch begins. What comes next is told while a step computes.
        assert result["asked"] == ["the next batch of its own"]
        assert "worker 0: 3, worker 1: 0" in result["refused"]
