"""Several workers whose devices share the state of a training."""

import numpy as np
import pytest

from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner
from tests.distributed import sharding_jobs as jobs

pytestmark = pytest.mark.full(keep=1)

MODES = [
    s
    for s in ("optimizer", "parameters")
    if not get_engine().sharding_unsupported_reason(s)
]


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("shard", MODES)
def test_two_workers_equal_one_device(shard, starter, tmp_path):
    one = jobs.train(None, str(tmp_path), alone=True)
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(jobs.train, shard, str(tmp_path))
    for rank, result in enumerate(results):
        for a, b in zip(one["fitted"], result["fitted"], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        for a, b in zip(result["fitted"], result["loaded"], strict=True):
            np.testing.assert_array_equal(a, b)
        assert result["apart"] == 0
        assert all(np.all(each == 1) for each in result["copies"])
        weights = 4 * (72 + 12 + 12 + 1)
        if get_engine().name == "torch":
            # Gradients and new weights in two steps: what two all-reduces send.
            assert set(result["sent"]) == {"all-to-all", "all-gather"}
            for count, sent in result["sent"].values():
                assert count == 2
                assert sent == pytest.approx(weights, abs=8)
        if get_engine().name == "tensorflow":
            # Of the one graph. With the gradients travels what tells what they are.
            assert result["sent"] == {
                "all-to-all": (1, pytest.approx(weights / 2, abs=100)),
                "all-gather": (1, pytest.approx(weights / 2, abs=8)),
            }
        # Kernels of 6 * 12 and 12, a bias of 12, and one of 1 that stays whole.
        split, whole = 4 * (72 + 12 + 12), 4
        parameters = split + whole if shard == "optimizer" else split // 2 + whole
        if shard == "parameters" and get_engine().name == "torch":
            parameters = 4 * (49, 48)[rank]  # of 97 elements
        assert result["bytes"].parameters == (parameters,)
        assert result["bytes"].slots[0] < 2 * (split // 2 + whole) + 17
    first, second = results
    assert first["loss"] == second["loss"]
    for a, b in zip(first["stepped"], second["stepped"], strict=True):
        np.testing.assert_array_equal(a, b)
