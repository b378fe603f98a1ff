"""What replicas on different workers tell each other."""

import ipaddress

import keras
import numpy as np
import pytest

from tests.distributed import jobs


@pytest.mark.full(keep=1, keep_on="tensorflow")
def test_collectives_of_workers(workers):
    results = workers.run(jobs.collectives)
    n = results[0]["replicas"]
    ids = np.arange(n, dtype="float32")
    for result in results:
        for part in result["local"]["sum"]:
            assert part == ids.sum()
        for part in result["local"]["mean"]:
            assert part == ids.mean()
        for part in result["local"]["gathered"]:
            np.testing.assert_array_equal(part, ids)
        assert result["sum"] == ids.sum()
        assert result["mean"] == ids.mean()
        assert result["elementwise"] == [ids.sum()]
        np.testing.assert_array_equal(result["gathered"], ids)
        assert result["total"] == (ids + 1).sum()
        np.testing.assert_array_equal(result["first"], results[0]["first"])
    told = np.concatenate([result["local"]["id"] for result in results])
    np.testing.assert_array_equal(told, ids)
    for result in results:
        beyond = [
            address
            for address in result["listens at"]
            if not ipaddress.ip_address(address).is_loopback
        ]
        # Of TensorFlow's servers docs/threat_model.md says so.
        assert bool(beyond) == (keras.backend.backend() == "tensorflow"), beyond


@pytest.mark.full(keep_on="tensorflow")
def test_first_replica_values_and_differing_shapes(in_turns):
    results, _ = in_turns(
        first=(jobs.only_the_first_counts, {}),
        shapes=(jobs.different_shapes, {}),
        dtypes=(jobs.gathered_dtypes, {}),
    )
    assert results["first"] == [[1.0, 1.0]] * 2
    for said in results["shapes"]:
        assert "worker 0: (2,)" in said and "worker 1: (3,)" in said
    rows = [0, 1, 2, 2]
    assert results["dtypes"][0] == {
        "bool": ("bool", [int(row > 0) for row in rows]),
        **{dtype: (dtype, rows) for dtype in ("int16", "float16")},
    }


@pytest.mark.full(keep_on="tensorflow")
def test_operation_of_collective_is_known(two_workers):
    """A worker that fails meanwhile is reported instead of the engine's error."""
    for names in two_workers.run(jobs.tracked_collectives):
        assert names == ["a sum", "two sums", "rows", "a value"]
