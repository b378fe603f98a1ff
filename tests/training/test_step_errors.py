"""An error of a step gets a note where that explains it, and only there."""

import keras
import numpy as np
import pytest

import keras_strategy as ks

BACKEND = keras.backend.backend()
X = np.ones((6, 4), "float32")
Y = np.ones((6, 1), "float32")


class Raising(keras.layers.Layer):
    error: Exception | None = None

    def call(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.fixture
def raising():
    layer = Raising()
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(X, Y)  # which builds it
    return layer, model


def notes_of(error, raising):
    layer, model = raising
    layer.error = error
    with pytest.raises(type(error)) as raised:
        model.fit(X, Y, verbose=0)
    return "".join(getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize(
    "error", [KeyError("shape"), NameError("the shape"), ValueError("bad luck")]
)
def test_error_of_other_cause_has_no_shape_hint(error, raising):
    assert "first dimension" not in notes_of(error, raising)


@pytest.mark.skipif(BACKEND == "jax", reason="a batch is whole there")
def test_error_about_shapes_has_shape_hint(raising, audit_mode):
    audit_mode("off")  # or the step would run whole
    error = ValueError("The shapes (3, 4) and (5, 4) do not fit.")
    assert "along the first dimension" in notes_of(error, raising)


def use_tape(x):
    tf = pytest.importorskip("tensorflow")
    with tf.GradientTape() as tape:
        loss = keras.ops.sum(x * 2.0)
    return tape.gradient(loss, x)


def use_backward(x):
    keras.ops.sum(x * 2.0).backward()


def use_grad(x):
    jax = pytest.importorskip("jax")
    return jax.grad(lambda x: keras.ops.sum(x * 2.0))(x)


FOREIGN = {
    "jax": [use_tape, use_backward],
    "torch": [use_tape, use_grad],
    "tensorflow": [use_backward, use_grad],
}


@pytest.mark.parametrize("use", FOREIGN[BACKEND])
def test_code_of_another_backend_is_named(use, two):
    with pytest.raises(Exception) as raised:
        two.run(lambda: use(keras.ops.ones(3)))
    notes = "".join(raised.value.__notes__)
    assert f"the Keras backend is {BACKEND}" in notes
    assert "value_and_grad" in notes


@pytest.mark.skipif(BACKEND == "tensorflow", reason="it is not foreign there")
def test_function_of_another_backend_is_refused(two):
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(TypeError, match="Remove `tf.function`"):
        two.run(tf.function(lambda: 1))


class ForeignStep(keras.Model):
    def train_step(self, *arguments):  # on JAX, the state comes first
        x, _ = arguments[-1]
        FOREIGN[BACKEND][0](x)
        return {}


def test_code_of_another_backend_in_train_step_is_named(two):
    with two.scope():
        inputs = keras.Input((4,))
        model = ForeignStep(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    with pytest.raises(Exception) as raised:
        model.fit(X, Y, verbose=0)
    assert "value_and_grad" in "".join(raised.value.__notes__)


def batches(kind):
    x, y = X, Y[:5]
    if kind == "generator":
        return ((x, y) for _ in range(2))
    if kind == "tf.data":
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensors((x, y))
    if kind == "tf.data of unknown rows":
        tf = pytest.importorskip("tensorflow")
        signature = tuple(tf.TensorSpec((None, n), tf.float32) for n in (4, 1))
        return tf.data.Dataset.from_generator(
            lambda: iter([(X, Y), (x, y)]), output_signature=signature
        )

    class Dataset(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return x, y

    return Dataset()


KINDS = ["generator", "tf.data", "tf.data of unknown rows", "PyDataset"]


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_built", [False, True])
def test_differing_rows_are_named_first(kind, is_built, two):
    with two.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    if is_built:
        model.train_on_batch(X, Y)
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError) as raised:
            method(batches(kind), verbose=0)
        sentence = str(raised.value)
        assert sentence.startswith("The arrays of a batch must have the same number of")
        assert "(6, 4), (5, 1)" in sentence or "rows: 6 5" in sentence
