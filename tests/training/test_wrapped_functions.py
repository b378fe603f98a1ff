"""Functions that users put around `train_function`, `test_function` and the like."""

import functools

import keras
import numpy as np
import pytest

from tests.equality.compare import assert_equal, largest, train

RNG = np.random.RandomState(7)
X = RNG.randn(17, 4).astype("float32")
Y = RNG.randn(17, 1).astype("float32")
JAX = keras.backend.backend() == "jax"


def wrap(model, kind, seen):
    """Note the loss or the predictions of each batch."""
    inner = getattr(model, f"{kind}_function")

    @functools.wraps(inner)
    def outer(*args):
        result = inner(*args)
        outputs = result[0] if JAX else result
        seen.append(outputs if kind == "predict" else outputs["loss"])
        return result

    setattr(model, f"{kind}_function", outer)


class Wrapped(keras.Sequential):
    """Wraps all of its functions when they are made."""

    def __init__(self, layers):
        super().__init__(layers)
        self.seen = []

    def make_train_function(self, force=False):
        super().make_train_function(force)
        wrap(self, "train", self.seen)

    def make_test_function(self, force=False):
        super().make_test_function(force)
        wrap(self, "test", self.seen)

    def make_predict_function(self, force=False):
        super().make_predict_function(force)
        wrap(self, "predict", self.seen)


class Wrapper(keras.callbacks.Callback):
    """Wraps the training function before an epoch, or before the first with None."""

    def __init__(self, epoch=None):
        super().__init__()
        self.epoch, self.seen = epoch, []

    def on_train_begin(self, logs=None):
        self.inner = self.model.train_function
        if self.epoch is None:
            wrap(self.model, "train", self.seen)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            wrap(self.model, "train", self.seen)

    def on_train_end(self, logs=None):
        self.model.train_function = self.inner


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize(
    ("model_class", "callbacks"),
    [
        (Wrapped, lambda: []),
        (keras.Sequential, lambda: [Wrapper()]),
        (keras.Sequential, lambda: [Wrapper(epoch=1)]),
    ],
    ids=["in the model", "before fit", "between epochs"],
)
def test_wrapper_is_called_for_each_batch(model_class, callbacks, two):
    def make():
        model = model_class([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def fit(strategy):
        added = callbacks()
        trained = train(strategy, make, X, Y, callbacks=added, predicted=None)
        trained.model.evaluate(X, Y, batch_size=8, verbose=0)
        trained.model.train_on_batch(X, Y)
        (seen,) = [x.seen for x in (trained.model, *added) if hasattr(x, "seen")]
        return trained, [keras.ops.convert_to_numpy(value) for value in seen]

    (one, seen), (many, others) = fit(None), fit(two)
    assert len(seen) >= 3
    assert largest(seen, others) < 1e-5
    assert_equal(one, many)
