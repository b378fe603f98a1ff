"""What `profile` says of a step whose figures are known."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training import reduction

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = X[:, :2] * 0.5
SCALAR = 4
# The kernel and the bias.
GRADIENTS = (6 * 2 + 2) * SCALAR
# The loss: its sum and its count. On JAX it is one number of a global program, and on
# torch it is read at the end alone.
LOGS = {"jax": SCALAR, "torch": 0, "tensorflow": 2 * SCALAR}


def test_time_fractions_sum_to_one():
    # Computing hides a collective; the collective alone counts, and so does a gap.
    assert reduction.compute_and_comm_fractions(
        [(0.0, 4.0, False), (2.0, 6.0, True), (7.0, 8.0, False), (7.0, 7.5, False)]
    ) == (5 / 8, 2 / 8)
    assert reduction.compute_and_comm_fractions([]) is None


def test_profile_of_fit(mirrored):
    def compiled(columns):
        model = keras.Sequential([keras.Input((columns,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    # One device's, which JAX may have on disk.
    compiled(6).fit(X, Y, batch_size=16, verbose=0)
    with mirrored(2).scope():
        model = compiled(6)
        # Another program of the same name and operations, which carries other bytes.
        smaller = compiled(3)
    smaller.fit(X[:, :3], Y, batch_size=16, verbose=0)
    profile = ks.profile(model, X, Y, batch_size=16, steps=4)
    backend = keras.backend.backend()
    assert profile.gradient_bytes == GRADIENTS
    assert profile.bytes == GRADIENTS + LOGS[backend]
    assert profile.collectives == {"jax": 1, "torch": 1, "tensorflow": 2 + 2}[backend]
    assert profile.compilations == 0
    assert profile.seconds > 0 and profile.calling_thread > 0
    if backend == "tensorflow":
        assert profile.computing is None and "not reported" in str(profile)
    else:
        assert profile.computing is not None and profile.collecting is not None
        assert profile.computing > 0 and profile.collecting > 0
        assert profile.computing + profile.collecting <= 1
        assert "in collectives" in str(profile)
    assert f"{GRADIENTS:,}" in str(profile) and "on 2 replicas" in str(profile)


def test_profile_of_function(mirrored):
    """Of which one sum is known: 3 numbers of each replica."""
    strategy = mirrored(2)

    def three(x):
        return ks.get_replica_context().all_reduce("sum", keras.ops.sin(x))

    # An argument: XLA would add up what it knows without a collective.
    x = np.ones(3, "float32")
    profile = ks.profile(lambda: strategy.run(three, args=(x,)), steps=4)
    assert (profile.collectives, profile.bytes) == (1, 3 * SCALAR)
    assert profile.gradient_bytes is None


def test_bad_arguments_are_refused(mirrored):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    with pytest.raises(TypeError, match="Expected `x`.*x=None"):
        ks.profile(model)
    with pytest.raises(TypeError, match="without arguments alone.*x=ndarray"):
        ks.profile(abs, X)
    with pytest.raises(ValueError, match="`steps`.*Received: 0"):
        ks.profile(model, X, Y, steps=0)
