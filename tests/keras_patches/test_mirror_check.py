"""config.check_mirrored: lost mirrors are noticed, where they are lost."""

import keras
import numpy as np
import pytest

import keras_strategy as ks

X = np.random.RandomState(0).randn(10, 3).astype("float32")


@pytest.fixture(autouse=True)
def checking():
    ks.config.check_mirrored(True)
    yield
    ks.config.check_mirrored(False)


def drift(variable):
    """Assigns what depends on the replica."""
    replica = ks.get_replica_context()
    offset = keras.ops.cast(replica.replica_id_in_sync_group, "float32")
    variable.assign(keras.ops.ones(variable.shape) + offset)


def test_drifting_variable_in_run_is_reported(mirrored):
    strategy = mirrored(3)
    with strategy.scope():
        good = keras.Variable([1.0, 2.0], name="good")
        bad = keras.Variable([1.0, 2.0], name="bad", aggregation="none")
    strategy.run(lambda: good.assign_add([1.0, 1.0]))

    def step():
        drift(bad)

    with pytest.raises(ks.errors.MirrorError, match="'bad'.*replica 1.*up to 1"):
        strategy.run(step)
    bad.assign([1.0, 2.0])
    assert strategy.run(lambda: 3) == 3


def test_check_can_be_disabled(two):
    with two.scope():
        bad = keras.Variable([1.0, 2.0], aggregation="none")
    ks.config.check_mirrored(False)

    def step():
        drift(bad)

    two.run(step)
    first, second = two.experimental_local_results(bad)
    assert float(first[0]) == 1.0 and float(second[0]) == 2.0


def test_allowed_differences_pass(two):
    with two.scope():
        own = keras.Variable(
            [1.0, 2.0], synchronization="on_read", aggregation="mean", trainable=False
        )
        nan = keras.Variable([float("nan")], aggregation="none", trainable=False)
        mean = keras.Variable([1.0, 2.0], aggregation="mean", trainable=False)

    def step():
        drift(own)
        drift(mean)
        nan.assign(nan.value * 1.0)

    two.run(step)
    np.testing.assert_allclose(mean.numpy(), [1.5, 1.5])


class Layer(keras.layers.Layer):
    """Keeps something that must not differ."""

    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), initializer="zeros", name="steps", dtype="int32", trainable=False
        )

    def call(self, x):
        self.steps.assign_add(1)
        return x


class Drifting(keras.optimizers.SGD):
    """Updates what replica 1 holds in another way."""

    def update_step(self, gradient, variable, learning_rate):
        replica = ks.get_replica_context()
        if replica is not None:
            gradient += keras.ops.cast(replica.replica_id_in_sync_group, "float32")
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.full(keep_on="tensorflow")
def test_fit_of_sound_model_passes(two):
    batches = []
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(batch)
    )
    with two.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                Layer(),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    for callbacks in (None, counting, [counting]):
        batches.clear()
        model.fit(X, X[:, :1], 4, 2, 0, callbacks)
        assert batches == ([] if callbacks is None else [0, 1, 2] * 2)
    model.train_on_batch(X, X[:, :1])
    model.evaluate(X, X[:, :1], verbose=0)
    model.predict(X, verbose=0)


def test_fit_of_drifting_model_is_reported(two):
    with two.scope():
        dense = keras.layers.Dense(1, use_bias=False, name="drifts")
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile(Drifting(), "mse")
    if keras.backend.backend() == "jax":
        # One program for all replicas: it has no way to differ.
        model.fit(X, X[:, :1], verbose=0)
        return
    with pytest.raises(ks.errors.MirrorError, match="drifts/kernel"):
        model.fit(X, X[:, :1], verbose=0)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="enabled=1"):
        ks.config.check_mirrored(1)


@pytest.mark.full(keep_on="torch")
def test_process_seeds_are_not_checked(two):
    keras.utils.clear_session()  # forgets the generator that other tests made
    with two.scope():
        keras.random.uniform((2,))
    two.run(lambda: keras.random.uniform((2,)))
    assert two.run(lambda: 3) == 3
