"""What is recognised as a worker's own rows, and what is said of the rest."""

import importlib.util

import numpy as np
import pytest

from tests.distributed import user_data_jobs as jobs
from tests.distributed.test_training import equal

HAS_TENSORFLOW, HAS_TORCH, HAS_GRAIN = [
    importlib.util.find_spec(name) is not None
    for name in ("tensorflow", "torch", "grain")
]
needs_libraries = pytest.mark.skipif(
    not (HAS_TENSORFLOW and HAS_TORCH), reason="reads what TensorFlow and torch share"
)
needs_grain = pytest.mark.skipif(not HAS_GRAIN, reason="reads with grain")


@pytest.fixture(scope="module")
def results(in_turns, tmp_path_factory):
    """What each of two workers returns."""
    folder = tmp_path_factory.mktemp("files")
    jobs.write_files(folder)
    calls = {"ended": (jobs.until_the_first_ends, {})}
    if HAS_TENSORFLOW and HAS_TORCH:
        calls["said"] = jobs.what_is_said, {}
        if HAS_GRAIN:
            calls["shared"] = jobs.what_others_share, {"folder": str(folder)}
    return in_turns(**calls)[0]


@pytest.mark.full
@needs_grain
@needs_libraries
def test_fit_with_users_data_kinds(results):
    expected = jobs.what_others_share(alone=True)
    for rank, result in enumerate(results["shared"]):
        for name in jobs.KINDS:
            assert equal(result[name], expected[name], 2e-5), name
        np.testing.assert_allclose(result["own"], expected["own"][rank], atol=2e-5)
        np.testing.assert_allclose(result["all"], expected["all"], atol=2e-5)
        assert len(result["not twice"]) == jobs.ROWS


@pytest.mark.full(keep_on="torch")
def test_training_ends_with_first_exhausted_worker(results):
    expected = jobs.until_the_first_ends(alone=True)
    for result in results["ended"]:
        assert equal(result, expected, 2e-5)


@needs_libraries
def test_shared_data_is_reported(results):
    chief, other = results["said"]
    errors = ("wrong", "part", "shuffled")
    assert not any(messages for name, messages in other.items() if name not in errors)
    assert chief["arrays"] == chief["own"] == []
    (same,) = chief["same"]
    assert "All workers read the same rows; with 2 workers that trains each" in same
    (stream,) = chief["stream"]
    assert "reads all rows of this data" in stream and "IndexedDataset" in stream
    assert chief["declared"] == []
    for result in (chief, other):
        for message in result["part"]:
            assert "Received different rows or values" in message
        (message,) = result["shuffled"]
        assert message.index("a seed is missing") < message.index("AutoShardPolicy.OFF")
        assert "must give shard r of 2" in result["wrong"][0]
