"""The profile of a step whose figures are known."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training import reduction
from tests.speed.counts import count_operations

pytestmark = pytest.mark.full

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = X[:, :2] * 0.5
BACKEND = keras.backend.backend()
# The loss: its sum and its count. On JAX it is one number of a global program, and on
# torch it is read at the end alone.
LOGS = {"jax": 4, "torch": 0, "tensorflow": 2 * 4}
# The kernel and the bias.
GRADIENTS = (6 * 2 + 2) * 4


def test_time_fractions_sum_to_one():
    # Computing hides a collective; the collective alone counts, and so does a gap.
    assert reduction.compute_and_comm_fractions(
        [(0.0, 4.0, False), (2.0, 6.0, True), (7.0, 8.0, False), (7.0, 7.5, False)]
    ) == (5 / 8, 2 / 8)
    assert reduction.compute_and_comm_fractions([]) is None


def test_profile_of_fit(mirrored):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    profile = ks.profile(model, X, Y, batch_size=16, steps=4)
    assert profile.gradient_bytes == GRADIENTS
    assert profile.collectives == (None if BACKEND == "tensorflow" else 1)
    assert profile.seconds > 0 and profile.calling_thread > 0
    if BACKEND == "tensorflow":
        assert profile.computing is None and "not reported" in str(profile)
    else:
        assert profile.computing is not None and profile.collecting is not None
        assert profile.computing > 0 and profile.collecting > 0
        assert profile.computing + profile.collecting <= 1
        assert "in collectives" in str(profile)
    assert f"{GRADIENTS:,}" in str(profile) and "on 2 replicas" in str(profile)


@pytest.mark.usefixtures("compiled_here")
def test_counts_of_fit(mirrored):
    def compiled(columns):
        model = keras.Sequential([keras.Input((columns,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    with mirrored(2).scope():
        model = compiled(6)
        # Another program of the same name and operations, which carries other bytes.
        smaller = compiled(3)
    smaller.fit(X[:, :3], Y, batch_size=16, verbose=0)

    def train(steps):
        rows = np.arange(16 * steps) % len(X)
        model.fit(X[rows], Y[rows], batch_size=16, verbose=0)

    train(4)
    short, long = count_operations(train, 2), count_operations(train, 4)
    collectives, sent, compilations, _ = np.subtract(long, short) / 2
    assert collectives == {"jax": 1, "torch": 1, "tensorflow": 2 + 2}[BACKEND]
    assert sent == GRADIENTS + LOGS[BACKEND] and compilations == 0


def test_profile_of_function(mirrored):
    strategy = mirrored(2)

    def three(x):
        return ks.get_replica_context().all_reduce("sum", keras.ops.sin(x))

    # An argument: XLA would add up what it knows without a collective.
    x = np.ones(3, "float32")

    def train(steps):
        for _ in range(steps):
            result = strategy.run(three, args=(x,))
        for value in strategy.experimental_local_results(result):
            keras.ops.convert_to_numpy(value)

    profile = ks.profile(lambda: strategy.run(three, args=(x,)), steps=4)
    short, long = count_operations(train, 2), count_operations(train, 4)
    assert list(np.subtract(long, short)[:2]) == [2, 2 * 3 * 4]
    assert profile.collectives == (None if BACKEND == "tensorflow" else 1)
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
