"""The first step of several workers is audited on some rows of each."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import audit_jobs

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="a step is one program there"
)


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("count, devices", [(2, 1), (2, 2)])
def test_finding_is_reported_once_by_the_chief(count, devices, starter):
    with WorkerRunner(count, devices, timeout_seconds=300, starter=starter) as runner:
        exact = runner.run(audit_jobs.fit)
        raised = runner.run(audit_jobs.fit, mode="raise")
    alone = audit_jobs.fit(alone=True)
    (message,) = exact[0]["messages"]
    assert "(Centering)" in message
    assert all(not result["messages"] for result in exact[1:])
    for result in exact:
        for name in ("Halving", "Centering"):
            for mine, one in zip(result[name], alone[name], strict=True):
                np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)
    assert all("(Centering)" in result["Centering error"] for result in raised)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings"
)
def test_step_with_strings_is_audited(two_workers):
    alone = audit_jobs.fit_text(alone=True)
    for weights in two_workers.run(audit_jobs.fit_text):
        for mine, one in zip(weights, alone, strict=True):
            np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)
