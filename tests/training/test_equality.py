"""N replicas end with what one device ends with."""

import keras
import numpy as np
import pytest

from keras_strategy.testing.equality.compare import (
    LOGS,
    WEIGHTS,
    assert_equal,
    largest,
    scope,
    train,
)

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


def lstm():
    return [
        keras.Input((5, 6)),
        keras.layers.LSTM(8),
        keras.layers.Dense(CLASSES, "softmax"),
    ]


# Each with an optimizer of its own: how a variable is updated does not depend on the
# layer that holds it, and the equality table has every optimizer. Nor does how rows are
# shared out, so one of the models is trained with every number of replicas.
MODELS = {
    "mlp": (mlp, (6,), lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "cnn": (cnn, (6, 6, 1), lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "lstm": (lstm, (5, 6), lambda: keras.optimizers.Adam(0.01)),
}
REPLICAS = {"mlp": (2, 3, 4), "cnn": (3,), "lstm": (3,)}
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


@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_one_device(kind, mirrored, record_property):
    one = session(None, kind)
    for replicas in REPLICAS[kind]:
        many = session(mirrored(replicas), kind)
        for name in ROWS:
            weights, logs, predictions = map(largest, one[name], many[name])
            record_property(f"{name} {replicas} replicas weights", weights)
            assert weights <= WEIGHTS, (replicas, name)
            assert logs <= LOGS, (replicas, name)
            assert predictions <= LOGS, (replicas, name)


def compiled(loss="mse", optimizer="adam", outputs=1, **compile):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(outputs)]
    )
    model.compile(optimizer, loss, **compile)
    return model


def regression(rows=21):
    rng = np.random.RandomState(1)
    x = rng.randn(rows, 4).astype("float32")
    return x, x[:, :1] * 2 + rng.randn(rows, 1).astype("float32")


def test_shuffle_draws_the_order_of_one_device(two):
    x, y = regression()
    one = train(None, compiled, x, y, shuffle=True)
    assert_equal(one, train(two, compiled, x, y, shuffle=True))


def test_sample_weight(two):
    x, y = regression()
    weight = np.random.RandomState(2).rand(len(x)).astype("float32")

    def make():
        return compiled(metrics=["mae"], weighted_metrics=["mse"])

    one = train(None, make, x, y, sample_weight=weight)
    many = train(two, make, x, y, sample_weight=weight)
    assert_equal(one, many)


def test_class_weight(two):
    x, y = data((4,), 21)

    def make():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(loss, outputs=CLASSES)

    weights = {0: 1.0, 1: 0.5, 2: 3.0}
    one = train(None, make, x, y, class_weight=weights)
    assert_equal(one, train(two, make, x, y, class_weight=weights))


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
)
def test_loss_reductions(reduction, mirrored):
    x, y = regression(17)
    weight = np.random.RandomState(2).rand(len(x)).astype("float32")

    def make():
        return compiled(keras.losses.MeanSquaredError(reduction=reduction), "sgd")

    one = train(None, make, x, y, sample_weight=weight)
    assert_equal(one, train(mirrored(3), make, x, y, sample_weight=weight))


def test_a_loss_function_that_returns_a_scalar(two):
    x, y = regression()

    def make():
        return compiled(lambda t, p: keras.ops.mean(keras.ops.square(t - p)))

    assert_equal(train(None, make, x, y), train(two, make, x, y))


def test_regularizers_and_activity_losses(two):
    x, y = regression()

    def make():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    8, "tanh", kernel_regularizer="l2", activity_regularizer="l2"
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        return model

    assert_equal(train(None, make, x, y), train(two, make, x, y))


def test_masked_sequences(two):
    rng = np.random.RandomState(3)
    x = rng.randint(0, 5, (21, 6))
    y = rng.randint(0, CLASSES, (21, 6))

    def make():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(5, 4, mask_zero=True),
                keras.layers.LSTM(4, return_sequences=True),
                keras.layers.Dense(CLASSES, "softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_equal(train(None, make, x, y), train(two, make, x, y))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.01},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_an_optimizer_does_beside_its_rule(optimizer, two):
    x, y = regression()

    def make():
        return compiled(optimizer=keras.optimizers.Adam(0.01, **optimizer))

    assert_equal(train(None, make, x, y), train(two, make, x, y))


def test_an_optimizer_that_averages_inside_a_loss_scale(two):
    """Both are conditions on TensorFlow, where one in the other may not synchronize."""
    x, y = regression()

    def make():
        average = {"use_ema": True, "ema_overwrite_frequency": 2}
        adam = keras.optimizers.Adam(0.01, **average)
        return compiled(optimizer=keras.optimizers.LossScaleOptimizer(adam))

    assert_equal(train(None, make, x, y), train(two, make, x, y))


def test_synchronized_batch_normalization(mirrored):
    """The statistics of the global batch, on every backend."""
    x, y = regression()

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

    one = train(None, make(False), x, y)
    for replicas in (2, 3):
        assert_equal(one, train(mirrored(replicas), make(True), x, y))


def test_several_inputs_and_outputs(mirrored):
    x, y = regression()
    x2, y2 = regression(21)[0][:, :2], y * 3

    def make():
        a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
        h = keras.layers.Dense(5, "tanh")(keras.layers.Concatenate()([a, b]))
        outputs = {
            "p": keras.layers.Dense(1, name="p")(h),
            "q": keras.layers.Dense(1, name="q")(h),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(
            "adam",
            {"p": "mse", "q": "mae"},
            loss_weights={"p": 1.0, "q": 0.5},
            metrics={"p": ["mae"]},
        )
        return model

    inputs, targets = {"a": x, "b": x2}, {"p": y, "q": y2}
    one = train(None, make, inputs, targets)
    assert_equal(one, train(mirrored(3), make, inputs, targets))


def test_metrics_that_are_not_means(two):
    x, y = data((4,), 21)
    y = (y > 0).astype("float32")[:, None]

    def make():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(
            "adam",
            "binary_crossentropy",
            metrics=[
                keras.metrics.AUC(name="auc"),
                keras.metrics.Precision(name="precision"),
                "accuracy",
            ],
        )
        return model

    assert_equal(train(None, make, x, y), train(two, make, x, y))


def test_two_runs_are_bit_equal(mirrored):
    x, y = regression()
    first = train(mirrored(3), compiled, x, y)
    second = train(mirrored(3), compiled, x, y)
    for a, b in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(a, b)
