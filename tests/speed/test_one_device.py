"""On one device a strategy adds nothing to a step of `fit`."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.speed.one_device_jobs import calls_of_a_step

pytestmark = pytest.mark.full

BACKEND = keras.backend.backend()
# torch runs Keras's Python at every step: there it is asked what the results of metrics
# are, and whose model makes a function.
CALLS = {"jax": 0, "tensorflow": 0, "torch": 10}


@pytest.mark.parametrize("name", ["OneDeviceStrategy", "MirroredStrategy"])
def test_python_calls_per_step(name, starter):
    # In a process of its own: what strategies of several replicas put in place stays.
    with WorkerRunner(1, timeout_seconds=300, starter=starter) as runner:
        (calls,) = runner.run(calls_of_a_step, name)
    assert calls <= CALLS[BACKEND]


@pytest.mark.skipif(
    BACKEND == "torch", reason="torch runs Keras's Python at every step"
)
def test_one_replica_has_no_leftovers_of_threads(two):
    two.run(lambda: None, options=ks.RunOptions(compile=False))
    assert calls_of_a_step("OneDeviceStrategy") <= CALLS[BACKEND]
