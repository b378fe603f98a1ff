"""`jit_compile` on torch where each replica has a process."""

import keras
import pytest

from keras_strategy.testing import WorkerRunner
from tests.equality.compare import largest

if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from tests.backends import torch_compiled_jobs as jobs  # noqa: E402

pytestmark = pytest.mark.full


def test_compiled_workers_equal_one_device(starter):
    with WorkerRunner(2, timeout_seconds=280, starter=starter) as runner:
        results = runner.run(jobs.all_of_them)
    for trained, failing, of_a_users_own in results:
        without, compiled = trained
        assert largest(compiled, without) == 0
        before, after = failing
        assert largest(after, before) == 0
        without, _, compiled, failed = of_a_users_own
        assert largest(compiled, without) < 1e-6
        assert largest(failed, compiled) == 0
