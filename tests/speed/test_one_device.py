"""On one device a strategy adds nothing to a step of `fit`."""

import keras
import pytest

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import fit_in_scope
from benchmarks.figures import python_calls

# torch runs Keras's Python at every step, and with it what extends it: each variable's
# read and assignment asks whether a replica is running.
CALLS = {"jax": 0, "tensorflow": 0, "torch": 165}


@pytest.mark.parametrize("make", [ks.OneDeviceStrategy, ks.MirroredStrategy])
def test_python_calls_of_a_step(make, two):
    # Replicas that took turns leave nothing behind.
    two.run(lambda: None, options=ks.RunOptions(compile=False))
    devices = "cpu:0" if make is ks.OneDeviceStrategy else ["cpu:0"]
    train = fit_in_scope(make(devices), CASES[0])
    train(2)  # builds and compiles
    per_step = (python_calls(train, 8) - python_calls(train, 3)) / 5
    assert per_step <= CALLS[keras.backend.backend()]
