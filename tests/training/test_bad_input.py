"""What is refused, with which words, and that nothing is changed by it."""

import os
import traceback

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.equality.compare import largest, scope

X = np.random.RandomState(7).randn(13, 4).astype("float32")
Y = np.random.RandomState(8).randn(13, 1).astype("float32")
JAX = keras.backend.backend() == "jax"


def compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


METHODS = ["compile", "fit", "evaluate", "predict"]
METHODS += ["train_on_batch", "test_on_batch", "predict_on_batch"]


@pytest.mark.full(keep_on="jax")
@pytest.mark.needs_patch("Model.fit", backend="torch", case="fit")
@pytest.mark.needs_patch("Model.evaluate", backend="torch", case="evaluate")
@pytest.mark.needs_patch("Model.predict", backend="torch", case="predict")
@pytest.mark.needs_patch("Model.train_on_batch", backend="torch", case="train_on_batch")
@pytest.mark.needs_patch("Model.test_on_batch", backend="torch", case="test_on_batch")
@pytest.mark.needs_patch(
    "Model.predict_on_batch", backend="torch", case="predict_on_batch"
)
@pytest.mark.parametrize("method", METHODS)
def test_model_from_outside_scope_is_refused(method, two):
    model = compiled()
    before = model.get_weights()
    data = (X,) if method.startswith("predict") else (X, Y)
    arguments = ("adam", "mse") if method == "compile" else data
    with two.scope(), pytest.raises(ValueError, match="created outside of it"):
        getattr(model, method)(*arguments)
    assert largest(before, model.get_weights()) == 0
    model.fit(X, Y, verbose=0)  # on one device it still works


def test_model_of_another_strategy_is_refused(mirrored):
    first, second = mirrored(2), mirrored(3)
    with first.scope():
        model = compiled()
    with second.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)


def test_fit_inside_run_is_refused(two):
    with two.scope():
        model = compiled()
    with pytest.raises(RuntimeError, match="outside `strategy.run`"):
        two.run(lambda: model.fit(X, Y, verbose=0))
    model.fit(X, Y, verbose=0)


class Failing(keras.layers.Layer):
    fail = False

    def call(self, x):
        if type(self).fail:
            raise ArithmeticError("a layer failed")
        return x


def test_strategy_is_usable_after_error_in_step(two):
    with two.scope():
        model = keras.Sequential([keras.Input((4,)), Failing(), keras.layers.Dense(1)])
        model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    before = model.get_weights()
    Failing.fail = True
    try:
        with pytest.raises(ArithmeticError, match="a layer failed"):
            model.fit(X, Y, verbose=0)
    finally:
        Failing.fail = False
    assert not ks.has_strategy()
    assert largest(before, model.get_weights()) == 0
    model.fit(X, Y, verbose=0)
    assert largest(before, model.get_weights()) > 0


class RaisingCallback(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        raise ArithmeticError("a callback failed")


def raising_loss(y_true, y_pred):
    raise ArithmeticError("a loss failed")


@pytest.mark.needs_patch(
    "keras.src.utils.traceback_utils.include_frame", backend="torch", case="layer"
)
@pytest.mark.parametrize("source", ["layer", "loss", "callback", "shape"])
def test_error_in_fit_has_short_traceback(source, two, monkeypatch):
    """As in Keras, with a setting that shows all frames."""
    loss = raising_loss if source == "loss" else "mse"
    callbacks = [RaisingCallback()] if source == "callback" else []

    def frames():
        with two.scope():
            inputs = keras.Input((5 if source == "shape" else 4,))
            model = keras.Sequential([inputs, Failing(), keras.layers.Dense(1)])
            model.compile("sgd", loss, run_eagerly=source == "layer")
        if source == "layer":
            model.fit(X, Y, verbose=0)
            monkeypatch.setattr(Failing, "fail", True)
        with pytest.raises((ArithmeticError, ValueError)) as raised:
            model.fit(X, Y, callbacks=callbacks, verbose=0)
        monkeypatch.setattr(Failing, "fail", False)
        files = [frame.filename for frame in traceback.extract_tb(raised.tb)]
        assert source == "shape" or files[-1] == __file__
        return sum(os.path.dirname(ks.__file__) in file for file in files)

    assert frames() <= 5
    keras.config.disable_traceback_filtering()
    try:
        # On JAX `fit` runs a layer in Keras's own step.
        assert (JAX and source == "layer") or frames() > 5
    finally:
        keras.config.enable_traceback_filtering()


class OfPairs(keras.Model):
    """Takes the first dimension of a batch for something else than rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, pairs):
        return self.dense(pairs[1])


@pytest.mark.skipif(JAX, reason="a batch is whole there")
def test_first_dimension_other_than_batch_runs_whole(two):
    pairs, found = np.stack([X, X + 1]), []
    for strategy in (None, two):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = OfPairs()
            model.compile("adam", "mse")
        found.append(model.predict(pairs, verbose=0))
    assert found[0].shape == (len(X), 1) and largest(*found) < 1e-5


@pytest.mark.needs_patch("Model._maybe_symbolic_build", backend="tensorflow")
def test_differing_row_counts_are_refused(two):
    with two.scope():
        model = compiled()
    model.train_on_batch(X, Y)
    before = model.get_weights()
    with pytest.raises((ValueError, TypeError)):
        model.train_on_batch(X, Y[:5])
    assert largest(before, model.get_weights()) == 0
    model.train_on_batch(X, Y)


def test_bad_weight_shapes_are_refused(two):
    with two.scope():
        model = compiled()
    before = model.get_weights()
    with pytest.raises(ValueError):
        model.set_weights([np.zeros((2, 2)), np.zeros(1)])
    assert largest(before, model.get_weights()) == 0


# --- data that does not fit, and sources that break


class Items(keras.utils.PyDataset):
    """Batches, and exceptions that are raised in their place."""

    def __init__(self, *items, **options):
        super().__init__(**options)
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


def breaking():
    yield X[:4], Y[:4]
    raise OSError("the source broke")


def tf_data(*arrays):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(arrays)


def endings():
    """13 rows in batches of 4, once."""
    return ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 13, 4))


GOOD = X[:4], Y[:4]
BAD = {
    "targets of other rows": lambda m: m.fit(b for b in (GOOD, (X[:4], Y[:3]))),
    "weights of other rows": lambda m: m.fit(b for b in ((*GOOD, np.ones(3)),)),
    "PyDataset with targets of other rows": lambda m: m.fit(
        Items(GOOD, (X[:4], Y[:3])), shuffle=False
    ),
    "arrays of other rows": lambda m: m.fit(X, Y[:5]),
    "other features": lambda m: m.fit(X[:, :3], Y),
    "single rows of tf.data": lambda m: m.fit(tf_data(X, Y)),
    "single rows of a generator": lambda m: m.fit(b for b in zip(X, Y, strict=True)),
    "scalars": lambda m: m.fit(b for b in ((1.0, 2.0),)),
    "empty generator": lambda m: m.fit(b for b in ()),
    "empty arrays": lambda m: m.fit(X[:0], Y[:0]),
    "empty arrays to predict": lambda m: m.predict(X[:0]),
    "empty tf.data": lambda m: m.fit(tf_data(X, Y).batch(4).take(0)),
    "empty PyDataset": lambda m: m.fit(Items()),
    "generator that ends in an epoch": lambda m: m.fit(
        endings(), steps_per_epoch=3, epochs=2
    ),
    "tf.data that ends in an epoch": lambda m: m.fit(
        tf_data(X, Y).batch(4), steps_per_epoch=6
    ),
    "generator that breaks": lambda m: m.fit(breaking()),
    "PyDataset that breaks in a thread": lambda m: m.fit(
        Items(GOOD, OSError("the source broke"), GOOD, workers=2), shuffle=False
    ),
}


def outcome(act, model):
    """The exception that something ends in, or the logs of a fit."""
    try:
        history = act(model)
    except Exception as error:
        return error
    return list(history.history.values())


def small():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


ORDER = {"batch_size": 4, "shuffle": False, "verbose": 0}


@pytest.fixture(scope="module")
def good():
    """The weights to begin with, and those after good data, on one device."""
    model = small()
    before = model.get_weights()
    model.fit(X, Y, **ORDER)
    return before, model.get_weights()


@pytest.fixture(scope="module")
def survivor():
    """One model on two replicas that goes through all of the tests below."""
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return small()


@pytest.mark.full(keep=5, keep_on="torch")
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("name", BAD)
def test_same_result_as_one_device_or_clearer_error(name, good, survivor):
    """And then training goes on as on one device with good data.

    On JAX Keras's own model may not: an error in the first step loses its variables.
    """
    before, after = good
    plain = small()
    for model in (plain, survivor):
        model.train_on_batch(*GOOD)  # Keras fails otherwise while it builds a model
        model.set_weights(before)
    one, many = (outcome(BAD[name], model) for model in (plain, survivor))
    if isinstance(one, Exception):
        if type(many).__name__ == "InvalidArgumentError":
            pass  # TensorFlow's, at a step, where it traced shapes of any size before
        elif type(one) is not type(many):
            assert isinstance(many, ValueError), many
            assert "A batch must" in str(many) or "arrays of a batch" in str(many)
        elif "broke" in str(one):
            assert str(one) == str(many) == "the source broke"
    else:
        assert not isinstance(many, Exception), many
        if JAX and name == "generator that ends in an epoch":
            # Keras logs the last epoch's metrics for one without a batch there.
            one, many = ([values[:1] for values in logs] for logs in (one, many))
        assert largest(one, many) < 1e-5
        assert largest(plain.get_weights(), survivor.get_weights()) < 2e-5
    survivor.set_weights(before)
    survivor.fit(X, Y, **ORDER)
    assert largest(after, survivor.get_weights()) < 2e-5


def test_differing_row_counts_are_named(two):
    with two.scope():
        model = compiled()
    model.train_on_batch(*GOOD)  # else Keras notices first, while it builds the model
    with pytest.raises(ValueError, match=r"\(4, 4\), \(3, 1\).*dataset.batch"):
        model.train_on_batch(X[:4], Y[:3])


def test_nan_in_one_row_equals_one_device(good, survivor):
    """It ends the training after the same batch; from good weights it goes on."""
    x = X.copy()
    x[7] = np.nan  # the second replica's, in the second batch
    before, after = good
    survivor.set_weights(before)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    stop = keras.callbacks.TerminateOnNaN()
    for model in (small(), survivor):
        losses = model.fit(x, Y, epochs=3, callbacks=[note, stop], **ORDER).history
        assert np.isnan(losses["loss"]).tolist() == [True]
        assert all(np.isnan(weight).all() for weight in model.get_weights())
    assert seen == [0, 1, 0, 1]
    survivor.set_weights(before)
    survivor.fit(X, Y, **ORDER)
    assert largest(after, survivor.get_weights()) < 2e-5
