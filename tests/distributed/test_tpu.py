"""A TPU of several hosts: one mesh over the cores of all, the weights of one device."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs, local_rows_jobs, sharding_jobs
from tests.distributed import tpu_jobs as tpu
from tests.distributed.test_training import equal

pytestmark = pytest.mark.full


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="TPUStrategy is there on JAX"
)
def test_two_hosts_equal_one_device(starter, tmp_path):
    with WorkerRunner(2, 4, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(tpu.on_hosts, str(tmp_path))
    fitted = jobs.fit_arrays(alone=True, **tpu.FITTED)
    looped = jobs.custom_loop(alone=True)
    shared = sharding_jobs.train(None, str(tmp_path), alone=True)["fitted"]
    factors = tpu.of_factors(alone=True)["trained"]
    (own,) = local_rows_jobs.of_tables(["equal"], 2, alone=True)
    for rank, result in enumerate(results):
        assert result["topology"] == [
            [1, 2, 1, 2],
            [[[0, y, 0, core] for core in (0, 1)] for y in (0, 1)],
        ]
        assert equal(result["fitted"], fitted, 2e-5)
        assert equal(result["looped"], looped, 2e-5)
        found = result["shared"]
        assert equal(found["fitted"], shared, 2e-5)
        for a, b in zip(found["fitted"], found["loaded"], strict=True):
            np.testing.assert_array_equal(a, b)
        assert found["apart"] == 0
        assert found["loss"] == results[0]["shared"]["loss"]
        # Of kernels of 72 and 12 the logical devices have halves. Besides, 4 replicas
        # share the 12 columns of the first one, and the bias of 12; the 6 rows that are
        # left of the other one can be halved.
        assert found["bytes"].parameters == (4 * (9 + 3 + 3 + 1),) * 2
        assert equal(result["factors"]["trained"], factors, 2e-5)
        # Kernels of (10, 6) in 2 by 2 parts, of (6, 10) in 2 of the halves that the
        # logical devices have, and of (10, 5) in 2.
        parts = {"apart": ((5, 3), 4), "split": ((3, 5), 4), "few": ((5, 5), 2)}
        for path, lies in result["factors"]["lies"].items():
            assert lies == next(parts[name] for name in parts if name in path), path
        assert len(result["factors"]["lies"]) == 9  # with two slots of each
        (found,) = result["own"]
        predicted = {rank: own["same"]["predicted"][rank]}
        assert equal(found["same"], {**own["same"], "predicted": predicted}, 2e-5)
        assert found["gathered"] == []
        cores, across, mixed, layouts = result["refused"]
        assert "each host's cores, which is 4" in cores
        assert "one host" in across and "[0, 1]" in across
        assert "in host order" in mixed
        assert "same `layout_map`" in layouts and "worker 1" in layouts
