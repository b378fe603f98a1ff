"""Steps of several workers that cannot be split by rows equal one device's."""

import pytest

from keras_strategy.core.registry import get_engine
from tests.distributed import whole_step_jobs as jobs
from tests.distributed.test_training import equal

pytestmark = pytest.mark.skipif(
    jobs.BACKEND == "jax"
    and get_engine().virtual_replicas_unsupported_reason() is not None,
    reason="`fit` is one program",
)


def test_workers_equal_one_device(in_turns):
    calls = {"programs": (jobs.train_programs, {}), "own": (jobs.train_own_rows, {})}
    found, printed = in_turns(**calls)
    programs, own = jobs.train_programs(alone=True), jobs.train_own_rows(alone=True)
    by_worker = own.pop("predictions")
    for rank in range(2):
        for name in jobs.NAMES:
            assert equal(found["programs"][rank][name], programs[name], 2e-5), name
        expected = {**own, "predictions": by_worker[rank]}
        assert equal(found["own"][rank], expected, 2e-5)
    # The chief warns, once for each function.
    text = "results are exact"
    counts = [sum(text in line for line in x.splitlines()) for x in printed]
    programs = [jobs.PROGRAMS[name] for name in jobs.NAMES]
    if jobs.BACKEND == "jax":  # whose calls are not recorded, so no part gathers
        assert counts == [sum(len(x.kinds.split()) for x in programs) + 3, 0]
    else:  # a part that gathers serves all functions
        numbers = [1 if x.gathers else len(x.kinds.split()) for x in programs]
        assert counts == [sum(numbers) + 1, 0]
