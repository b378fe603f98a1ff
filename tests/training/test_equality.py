"""N replicas end with what one device ends with, for several N and sizes of batches.

What Keras does in a step is in the equality table, on two replicas.
"""

import keras
import numpy as np
import pytest

from tests.equality.compare import LOGS, WEIGHTS, assert_equal, largest, scope, train
from tests.equality.models import regression
from tests.training.shared import alone

CLASSES = 3


def mlp():
    return [
        keras.Input((6,)),
        keras.layers.Dense(16, "relu"),
        keras.layers.Dense(CLASSES, "softmax"),
    ]


def cnn():
    return [
        keras.Input((6, 6, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(CLASSES, "softmax"),
    ]


# Each with an optimizer of its own: how a variable is updated does not depend on the
# layer that holds it, and the equality table has every optimizer. Nor does how rows are
# shared out, so each of the models is trained with another number of replicas.
MODELS = {
    "mlp": (mlp, (6,), lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "cnn": (cnn, (6, 6, 1), lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
}
REPLICAS = {"mlp": 3, "cnn": 4}
# By batches of 8 the last one has 5, 1 or 2 rows: an uneven split, a row for the
# first replica alone, and replicas without any.
ROWS = {"uneven": 21, "one_row": 17, "two_rows": 18}


def data(shape, rows):
    rng = np.random.RandomState(0)
    x = rng.randn(rows, *shape).astype("float32")
    return x, rng.randint(0, CLASSES, rows)


def session(strategy, kind):
    """One model in one fit after another, each with its own last batch.

    Returns:
        By name of the fit, arrays of weights, of logs and of predictions.
    """
    layers, shape, optimizer = MODELS[kind]
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = keras.Sequential(layers())
        model.compile(
            optimizer(),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            # To compile the steps takes longer than to run them a few times.
            run_eagerly=strategy is None and keras.backend.backend() == "tensorflow",
        )
    results = {}
    for name, rows in ROWS.items():
        x, y = data(shape, rows)
        history = model.fit(
            x, y, batch_size=8, verbose=0, validation_data=data(shape, 11)
        ).history
        assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
        results[name] = (
            [
                *model.get_weights(),
                *(
                    keras.ops.convert_to_numpy(v.value)
                    for v in model.optimizer.variables
                ),
            ],
            list(history.values()),
            [model.predict(x, batch_size=8, verbose=0)],
        )
    return results


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_one_device(kind, mirrored, record_property):
    one = session(None, kind)
    many = session(mirrored(REPLICAS[kind]), kind)
    for name in ROWS:
        weights, logs, predictions = map(largest, one[name], many[name])
        record_property(f"{name} weights", weights)
        assert weights <= WEIGHTS, name
        assert logs <= LOGS, name
        assert predictions <= LOGS, name


def compiled():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


@pytest.mark.full(keep=1)
@pytest.mark.needs_patch(
    "BatchNormalization.__init__", "BatchNormalization._moments", backend="torch"
)
def test_synchronized_batch_normalization(mirrored):
    """The statistics of the global batch, on every backend."""
    x, y = regression(21)

    def make(synchronized):
        def compiled():
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    # A bias before a normalization has a gradient of pure rounding
                    # noise, which Adam would scale up to whole steps.
                    keras.layers.Dense(6, use_bias=False),
                    keras.layers.BatchNormalization(synchronized=synchronized),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("adam", "mse")
            return model

        return compiled

    one = alone(make(False), x, y)
    assert_equal(one, train(mirrored(3), make(True), x, y))


@pytest.mark.full(keep=1)
def test_two_runs_are_bit_equal(mirrored):
    x, y = regression(21)
    first = train(mirrored(3), compiled, x, y, predicted=0)
    second = train(mirrored(3), compiled, x, y, predicted=0)
    for a, b in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(a, b)
