"""Custom optimizers, which change the gradients before Keras's code runs."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from conformance import models
from conformance.compare import assert_equal, train
from tests.training.shared import alone, logged
from tests.training.test_custom_train_steps import OwnSteps

SGD: Any = keras.optimizers.SGD
Optimizer: Any = keras.optimizers.Optimizer
# By batches of 8 the last one has a row for the first replica alone.
X, Y = models.regression(17)


def clipped(gradients):
    return [ops.clip(gradient, -0.05, 0.05) for gradient in gradients]


class Clips:
    """A mixin, which is no optimizer itself."""

    def apply(self, grads, trainable_variables=None):
        super().apply(clipped(grads), trainable_variables)  # pyright: ignore


MixedIn: Any = type("MixedIn", (Clips, SGD), {})


class ClipsPairs(SGD):
    """On TensorFlow, `fit` calls it."""

    def apply_gradients(self, grads_and_vars):
        gradients, variables = zip(*grads_and_vars, strict=True)
        return super().apply_gradients(zip(clipped(gradients), variables, strict=True))


class ClipsInside(SGD):
    """Overrides what Keras calls with gradients that are summed already."""

    def _backend_apply_gradients(self, grads, trainable_variables):
        super()._backend_apply_gradients(clipped(grads), trainable_variables)


class Signs(Optimizer):
    def update_step(self, gradient, variable, learning_rate):
        step = ops.cast(learning_rate, variable.dtype) * ops.tanh(gradient * 10)
        self.assign_sub(variable, step)


class Langevin(SGD):
    """Draws noise of a weight's shape, whose first size may be the local rows."""

    def __init__(self, rate):
        super().__init__(rate)
        self.seed_generator = keras.random.SeedGenerator(9)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=self.seed_generator)
        step = ops.cast(learning_rate, variable.dtype) * (gradient + noise)
        self.assign_sub(variable, step)


class Normalizes(Optimizer):
    """Wraps another optimizer, and keeps a number of the gradients."""

    def __init__(self, inner):
        super().__init__(learning_rate=1.0)
        self.inner = inner

    def build(self, variables):
        self.norm = self.add_variable((), name="norm")
        self.inner.build(variables)
        super().build(variables)

    @property
    def variables(self):
        return self._variables + self.inner.variables

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        squares = [ops.sum(ops.square(gradient)) for gradient in grads]
        norm = ops.sqrt(sum(squares[1:], squares[0]))
        self.norm.assign(0.9 * self.norm + 0.1 * norm)
        self.inner.apply([g / (1 + 10 * norm) for g in grads], trainable_variables)
        self._iterations.assign_add(1)


OPTIMIZERS = {
    "apply": lambda: MixedIn(0.1, momentum=0.9),
    "_backend_apply_gradients": lambda: ClipsInside(0.1),
    "update_step": lambda: Signs(0.1),
    "noise": lambda: Langevin(0.1),
    "wrapper": lambda: Normalizes(keras.optimizers.Adam(0.1)),
    "apply_gradients": lambda: ClipsPairs(0.1),
    "accumulation": lambda: MixedIn(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        MixedIn(0.1), initial_scale=4.0
    ),
}


@pytest.mark.full(keep=3, keep_on="torch")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_with_custom_optimizer_equals_one_device(name, mirrored):
    def make():
        return models.compiled(optimizer=OPTIMIZERS[name]())

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(mirrored(3), make, X, Y, predicted=0, eagerly=True))


@pytest.mark.full(keep_on="torch")
def test_custom_optimizer_in_custom_step_is_not_warned_of(two, caplog):
    def make():
        model = OwnSteps()
        model.compile(MixedIn(0.1), "mse")
        return model

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(two, make, X, Y, predicted=0))
    assert not logged(caplog)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("name", ["apply", "wrapper"])
def test_sharded_custom_optimizer_equals_one_device(name):
    def make():
        return models.compiled(optimizer=OPTIMIZERS[name]())

    many = ks.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer")
    one = alone(make, X[:16], Y[:16], predicted=0)
    assert_equal(one, train(many, make, X[:16], Y[:16], predicted=0))


# Keras's own loss scaling on JAX works in a trainer alone.
@pytest.mark.full(keep=2, keep_on="jax")
@pytest.mark.parametrize(
    "name",
    ["apply_gradients", "apply", "wrapper", "accumulation", "noise"]
    + ["loss scale"] * (keras.backend.backend() != "jax"),
)
def test_custom_optimizer_in_run_equals_one_device(name, mirrored):
    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = models.mlp(), OPTIMIZERS[name]()
            optimizer.build(model.trainable_variables)
        variables = model.trainable_variables

        def step(x, y):
            def loss():
                return ks.compute_average_loss(ops.mean((model(x) - y) ** 2, -1))

            _, gradients = ks.value_and_grad(loss, variables)()
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        batches = [(X[:6], Y[:6]), (X[6:11], Y[6:11])]
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=batch)
        return [v.numpy() for v in (*model.variables, *optimizer.variables)]

    one, many = trained(ks.OneDeviceStrategy("cpu:0")), trained(mirrored(3))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_run_on_one_device_builds_optimizer(mirrored):
    mirrored(2)  # which patches `Optimizer.apply`
    with (strategy := ks.OneDeviceStrategy("cpu:0")).scope():
        variable, optimizer = keras.Variable([1.0, 2.0]), keras.optimizers.Adam(0.1)
    strategy.run(lambda: optimizer.apply([ops.ones(2)], [variable]))
    np.testing.assert_allclose(ops.convert_to_numpy(variable), [0.9, 1.9], atol=1e-5)


class Lookups(keras.layers.Layer):
    """Adds embeddings of words, and of indices that are `kind`."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.words = keras.layers.Embedding(9, 3)
        self.others = keras.layers.Embedding(9, 3)
        self.seed = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.words.build(shape)
        self.others.build(shape)

    def call(self, x):
        indices: Any = ops.arange(ops.shape(x)[1])
        if self.kind == "the same for all rows":
            return self.words(x) + self.others(indices)
        if self.kind == "looked up in one table":
            return self.words(x) + self.words(indices)
        if self.kind == "drawn for all rows":
            drawn = keras.random.randint((7,), 0, 4, seed=self.seed)
            return self.words(x) + ops.mean(self.others(drawn), axis=0)
        assert self.kind == "repeated for each row"
        return self.words(x) + self.others(ops.broadcast_to(indices, ops.shape(x)))


@pytest.mark.parametrize(
    "kind",
    [
        "the same for all rows",
        "looked up in one table",
        "drawn for all rows",
        "repeated for each row",
    ],
)
def test_embeddings_of_shared_indices_equal_one_device(kind, mirrored):
    """On TensorFlow, Keras's optimizers square each slice of a gradient."""

    def make():
        embedded = [keras.Input((5,), dtype="int32"), Lookups(kind)]
        out = [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([*embedded, *out])
        model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.5), "mse")
        return model

    words = np.random.RandomState(4).randint(0, 9, (17, 5))
    one = train(None, make, words, Y, predicted=0)
    assert_equal(one, train(mirrored(3), make, words, Y, predicted=0))
