"""Losses of a user's own, of which it is not known what they do with the rows."""

import keras
import pytest
from keras import layers, ops

from tests.equality import models
from tests.equality.compare import assert_equal, scope, train
from tests.training.shared import alone, logged

BACKEND = keras.backend.backend()
# By batches of 8 the last one has a row for the first replica alone.
X, Y = models.regression(17)


class Pairs(keras.losses.Loss):
    """Compares all rows with each other, and is called in Keras's stead."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        between = [y - ops.transpose(y) for y in (y_true, y_pred)]
        return ops.mean(ops.square(between[0] - between[1]))


@pytest.mark.full(keep_on="torch")
def test_loss_with_custom_call_equals_one_device(mirrored):
    def make():
        inputs = keras.Input((models.FEATURES,))
        # Not a bias in the end, which differences do not see.
        outputs = layers.Dense(1, use_bias=False)(layers.Dense(8, "tanh")(inputs))
        return models.compiled(keras.Model(inputs, outputs), loss=Pairs())

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(mirrored(3), make, X, Y, predicted=0))


class Adding(layers.Layer):
    """Adds a sum or a mean, of which a callback changes the weight."""

    def __init__(self, mean):
        super().__init__()
        self.mean = mean
        self.weight = self.add_weight((), "ones", trainable=False)

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=1)
        rows = ops.cast(ops.shape(x)[0], x.dtype) if self.mean else 8.0
        self.add_loss(self.weight * ops.sum(x) / rows)
        return x + 0.0 * noise


@pytest.mark.full(keep_on="torch")
def test_added_sum_warns_and_equals_one_device(two, caplog):
    def trained(strategy, mean):
        def make():
            return models.compiled(models.mlp(lambda: Adding(mean)))

        def anneal(epoch, logs):
            model.layers[1].weight.assign(0.5)

        with scope(strategy):
            keras.utils.set_random_seed(1)
            model = make()
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=anneal)]
        return train(strategy, lambda: model, X, Y, predicted=0, callbacks=callbacks)

    assert_equal(trained(None, True), trained(two, True))
    assert not logged(caplog)
    assert_equal(trained(None, False), trained(two, False))
    if BACKEND == "jax":
        assert not logged(caplog)
        return
    (message,) = logged(caplog)
    assert "what layers pass to `add_loss`, is not a mean" in message
    assert "Divide a sum by the number of rows" in message


class Own(layers.Layer):
    def call(self, x):
        return x


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("mixes_rows", [False, True])
def test_activity_regularizers_equal_one_device(mixes_rows, mirrored, caplog):
    def make():
        if mixes_rows:  # although all of it is Keras's
            mixer = keras.regularizers.OrthogonalRegularizer(0.1, "columns")
            dense = lambda: layers.Dense(5, activity_regularizer=mixer)  # noqa: E731
            return models.compiled(models.mlp(dense))
        regularized = (
            lambda: layers.Dense(
                6, activity_regularizer=keras.regularizers.L1L2(0.1, 0.1)
            ),
            lambda: layers.Dense(
                5, activity_regularizer=lambda x: 0.1 * ops.sum(ops.abs(x))
            ),
            lambda: layers.ActivityRegularization(l2=0.1),
            lambda: Own(activity_regularizer=lambda x: ops.sum(ops.square(x))),
        )
        return models.compiled(models.mlp(*regularized))

    options = {
        "sample_weight": models.weights_of(17),
        "validation_data": (X[:11], Y[:11]),
    }
    strategy = mirrored(3)
    one = alone(make, X, Y, **options)
    assert_equal(one, train(strategy, make, X, Y, **options))
    if mixes_rows and BACKEND != "jax":  # where a step is one program over all rows
        assert len(logged(caplog)) == 2


class LossByBatchSize(layers.Layer):
    """Adds the first constant to the loss of a full batch, else the second."""

    def __init__(self, full, partial):
        super().__init__()
        self.constants = full, partial

    def call(self, x):
        full, partial = self.constants
        self.add_loss(full if x.shape[0] in (4, 8) else partial)
        return x


def layers_with_reused_losses():
    """Return two layers of which each adds what the other added to another batch."""
    # As when memory is reused: a new loss has the id of another layer's old one.
    constants = ops.convert_to_tensor(1.0), ops.convert_to_tensor(2.0)
    return LossByBatchSize(*constants), LossByBatchSize(*reversed(constants))


@pytest.mark.needs_patch(
    "backends.threads.patches StatelessScope.__exit__", backend="jax"
)
def test_added_losses_count_when_a_step_is_traced_again(mirrored):
    with mirrored(1).scope():
        dense = layers.Dense(1, kernel_initializer="zeros")
        inputs = keras.Input(X.shape[1:])
        model = keras.Sequential([inputs, *layers_with_reused_losses(), dense])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    history = model.fit(X[:11], 0 * Y[:11], batch_size=8, verbose=0).history
    assert history["loss"] == [3.0]


@pytest.mark.needs_patch("backends.threads.patches Layer.add_loss", backend="torch")
def test_added_losses_of_two_models_count_in_every_run(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        first, second = map(
            lambda layer: keras.Sequential([keras.Input((3,)), layer]),
            layers_with_reused_losses(),
        )

    def step(x):
        first(x), second(x)
        return ops.stack([*first.losses, *second.losses])

    for rows, expected in (4, [1, 2]), (2, [2, 1]), (4, [1, 2]):
        result = strategy.run(step, args=(ops.ones((rows, 3)),))
        for losses in strategy.experimental_local_results(result):
            assert ops.convert_to_numpy(losses).tolist() == expected
