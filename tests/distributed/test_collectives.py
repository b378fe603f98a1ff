"""Collectives of replicas on different workers."""

import ipaddress

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.distributed import jobs


def only_the_first_counts() -> list[float]:
    """Reads a variable of which all replicas but the first hold infinity."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = keras.Variable(
            0.0, synchronization="on_read", aggregation="only_first_replica"
        )

    def step():
        context = ks.get_replica_context()
        first = keras.ops.equal(context.replica_id_in_sync_group, 0)
        v.assign(keras.ops.where(first, 1.0, np.inf))
        return context.merge_call(lambda strategy: v + 0.0)

    read = strategy.run(step, options=ks.RunOptions(compile=False))
    inside = strategy.experimental_local_results(read)[0]
    return [float(inside), float(keras.ops.convert_to_numpy(v))]


def tracked_collectives() -> list[str]:
    """Return the operation in which each collective reports a failed worker."""
    strategy = ks.MultiWorkerMirroredStrategy()
    workers, names = strategy.extended.group.workers, []
    value = keras.ops.ones((2,))
    for collective in (
        lambda: workers.sum("a sum", value),
        lambda: workers.sum_all("two sums", [value, value]),
        lambda: workers.gather("rows", value, 0),
        lambda: workers.broadcast("a value", [value]),
    ):
        collective()
        names.append(strategy.extended.cluster.client.trace.last)
    return names


def different_shapes() -> str:
    """A collective of values of different shapes on the workers."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    value = np.ones((2 + rank,), "float32")
    out = strategy.experimental_distribute_values_from_function(lambda _: value)
    try:
        strategy.reduce("sum", out, axis=None)
    except ValueError as error:
        return str(error)
    return "no error"


def gathered_dtypes() -> dict:
    """Gathers values of dtypes that not every library of collectives knows."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    gathered = {}
    for dtype in ("bool", "int16", "float16"):
        rows = keras.ops.convert_to_tensor(np.arange(2 * rank, 3).astype(dtype))
        value = strategy.experimental_distribute_values_from_function(
            lambda _, rows=rows: rows
        )
        joined = keras.ops.convert_to_numpy(strategy.gather(value, axis=0))
        gathered[dtype] = str(joined.dtype), joined.astype(int).tolist()
    return gathered


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
        first=(only_the_first_counts, {}),
        shapes=(different_shapes, {}),
        dtypes=(gathered_dtypes, {}),
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
    for names in two_workers.run(tracked_collectives):
        assert names == ["a sum", "two sums", "rows", "a value"]
