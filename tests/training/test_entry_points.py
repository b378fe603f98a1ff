"""fit, evaluate, predict and the `*_on_batch`, however the model came to be."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.equality.compare import assert_equal, largest, scope, train
from tests.training.shared import alone

RNG = np.random.RandomState(7)
X = RNG.randn(21, 4).astype("float32")
Y = RNG.randn(21, 1).astype("float32")

JAX = keras.backend.backend() == "jax"


def sequential():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    )


def deferred():
    return keras.Sequential([keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])


def functional():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5, "tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def normalized():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
    )


MODELS = [sequential, deferred, functional, Subclass, normalized]


# The equality table has a Sequential model with its inputs, and normalizations.
@pytest.mark.full(keep=2, keep_on="tensorflow")
@pytest.mark.parametrize(
    "make", [deferred, functional, Subclass], ids=lambda m: m.__name__
)
def test_kinds_of_models(make, mirrored):
    def compiled():
        model = make()
        model.compile("adam", "mse", metrics=["mae"])
        return model

    one = alone(compiled, X, Y)
    assert_equal(one, train(mirrored(3), compiled, X, Y))


def weights_after(strategy, inside: str):
    """Trains with `compile` or `fit`, or both, inside the scope."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = sequential()
        if "compile" in inside:
            model.compile("adam", "mse", metrics=["mae"])
        if "fit" in inside:
            model.fit(X, Y, batch_size=8, verbose=0)
    if "compile" not in inside:
        model.compile("adam", "mse", metrics=["mae"])
    if "fit" not in inside:
        model.fit(X, Y, batch_size=8, verbose=0)
    return model.get_weights()


@pytest.mark.full(keep_on="torch")
def test_compile_and_fit_inside_and_outside_scope(two):
    one = weights_after(None, "")
    for inside in ("", "compile and fit"):  # other tests compile inside
        assert largest(one, weights_after(two, inside)) < 2e-5, inside


@pytest.mark.full(keep_on="jax")
@pytest.mark.needs_patch("Model._symbolic_build", backend="tensorflow")
def test_optimizer_and_metric_from_outside_scope(two):
    def fit(strategy):
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.Adam(0.01)
        metric = keras.metrics.MeanAbsoluteError(name="mae")
        with scope(strategy):
            model = sequential()
        model.compile(optimizer, "mse", metrics=[metric])
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
        return [*model.get_weights(), *history["loss"], *history["mae"]]

    assert largest(fit(None), fit(two)) < 1e-5


@pytest.mark.full(keep_on="torch")
def test_base_model_from_outside_scope(two):
    def fit(strategy):
        keras.utils.set_random_seed(1)
        base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh")])
        with scope(strategy):
            model = keras.Sequential([base, keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    assert largest(fit(None), fit(two)) < 2e-5


@pytest.mark.full(keep_on="torch")
def test_on_batch_methods(mirrored):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = sequential()
            model.compile("adam", "mse", metrics=["mae"])
        for rows in (1, 5):
            model.reset_metrics()
            logs = [model.train_on_batch(X[:rows], Y[:rows]) for _ in range(2)]
            logs.append(model.test_on_batch(X[:rows], Y[:rows]))
            prediction = model.predict_on_batch(X[:rows])
            assert isinstance(prediction, np.ndarray) and prediction.shape == (rows, 1)
            yield [*logs, prediction, *model.get_weights()]

    for one, many in zip(use(None), use(mirrored(3)), strict=True):
        assert largest(one, many) < 1e-5


@pytest.mark.full(keep_on="jax")
@pytest.mark.needs_patch("Model.distribute_strategy", backend="tensorflow")
def test_evaluate_and_predict(mirrored):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = sequential()
            model.compile("adam", "mse", metrics=["mae"])
        logs = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
        assert set(logs) == {"loss", "mae"}
        predictions = model.predict(X, batch_size=8, verbose=0)
        assert isinstance(predictions, np.ndarray) and predictions.shape == (21, 1)
        return [*logs.values(), predictions]

    assert largest(use(None), use(mirrored(3))) < 1e-5


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalar", "vector"])
def test_outputs_without_rows(shape, two, audit_mode):
    """Predictions that cannot be joined row by row run whole."""

    class Temperature(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.temperature = self.add_weight(shape=shape, initializer="ones")

        def call(self, x):
            t = self.temperature * 1.0
            return {"y": self.dense(x) * keras.ops.sum(t), "temperature": t}

    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = Temperature()
            model.compile("sgd", {"y": "mse", "temperature": None})
        losses = model.fit(X, {"y": Y}, batch_size=8, verbose=0).history["loss"]
        return model, [*losses, *model.get_weights()]

    (one, trained), (many, also) = use(None), use(two)
    assert largest(trained, also) < 1e-5
    own, ours = one.predict_on_batch(X), many.predict_on_batch(X)
    assert largest([*own.values()], [*ours.values()]) < 1e-5
    if JAX:
        return
    audit_mode("off")
    many, _ = use(two)
    for predict in (many.predict, many.predict_on_batch):
        with pytest.raises(ValueError, match=r"output \['temperature'\] of shape"):
            predict(X)


@pytest.mark.full(keep=2, keep_on="tensorflow")
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
def test_predict_without_training(make, two):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = make()
        return [model.predict(X, batch_size=8, verbose=0), model.predict_on_batch(X)]

    assert largest(use(None), use(two)) < 1e-5


@pytest.mark.full(keep_on="torch")
def test_backend_tensors(two):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = sequential()
            model.compile("adam", "mse")
        x, y = keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)
        loss = model.train_on_batch(x, y)
        history = model.fit(x, y, batch_size=8, verbose=0).history
        predictions = model.predict(x, batch_size=8, verbose=0)
        return [loss, *history["loss"], predictions, *model.get_weights()]

    assert largest(use(None), use(two)) < 1e-5


def test_model_call(two):
    with two.scope():
        model = sequential()
        inside = model(X)
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    outside = keras.ops.convert_to_numpy(model(X))
    assert inside.shape == (21, 1)
    np.testing.assert_allclose(outside, model.predict(X, verbose=0), atol=1e-6)


def test_reading_and_setting_weights(two):
    with two.scope():
        model = sequential()
        model.compile("adam", "mse")
    weights = [w + 1 for w in model.get_weights()]
    model.set_weights(weights)
    assert largest(weights, model.get_weights()) == 0
    for variable, weight in zip(model.weights, weights, strict=True):
        for component in two.experimental_local_results(variable):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(component), weight)
    plain = sequential()
    plain.set_weights(weights)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), atol=1e-6
    )


@pytest.mark.full(keep=1, keep_on="jax")
def test_components_are_equal_after_training(mirrored):
    strategy = mirrored(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    for variable in [*model.variables, *model.optimizer.variables]:
        first, *others = [
            keras.ops.convert_to_numpy(c)
            for c in strategy.experimental_local_results(variable)
        ]
        assert len(others) == 2 and np.isfinite(first).all()
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=variable.path)


@pytest.mark.full(keep_on="torch")
def test_custom_compute_loss(two):
    class Own(keras.Model):
        """Counts its steps, and logs what is no metric."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return keras.ops.mean(keras.ops.abs(y - y_pred)) + 0.01 * keras.ops.sum(
                keras.ops.square(self.dense.kernel)
            )

    def make():
        model = Own()
        model.compile("adam", metrics=["mae"])
        return model

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(two, make, X, Y, predicted=0))


@pytest.mark.full(keep=1, keep_on="torch")
def test_two_models_under_two_strategies(mirrored):
    def compiled():
        model = sequential()
        model.compile("adam", "mse")
        return model

    one = alone(compiled, X, Y, predicted=0)
    first, second = mirrored(2), mirrored(4)
    for strategy in (first, second, first):
        assert_equal(one, train(strategy, compiled, X, Y, predicted=0))


@pytest.mark.full(keep_on="torch")
def test_one_device(two):
    def compiled():
        model = sequential()
        model.compile("adam", "mse", metrics=["mae"])
        return model

    one = train(None, compiled, X, Y)
    for strategy in (ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy(["cpu:0"])):
        many = train(strategy, compiled, X, Y)
        assert largest(one.weights, many.weights) == 0
        assert largest(list(one.logs.values()), list(many.logs.values())) == 0


@pytest.mark.full(keep=1, keep_on="tensorflow")
def test_steps_per_execution(mirrored):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = sequential()
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
        # Three batches, of which the last is alone and smaller.
        fit = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        evaluated = model.evaluate(X, Y, batch_size=8, verbose=0)
        prediction = model.predict(X, batch_size=8, verbose=0)
        logs = [*fit.history["loss"], *fit.history["mae"], *evaluated]
        return [*logs, prediction, *model.get_weights()]

    try:
        one = use(None)
    except ValueError as error:
        if "`steps_per_execution` must be 1" not in str(error):
            raise
        pytest.skip("this Keras computes one step in an execution on this backend")
    assert largest(one, use(mirrored(2))) < 2e-5
    assert largest(one, use(mirrored(3))) < 2e-5
