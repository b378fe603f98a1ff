"""However a model came to be: in parts, as a copy, out of a file or a pickle."""

import copy
import pickle
import re

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.equality.compare import WEIGHTS, assert_equal, largest, scope, train
from tests.training.shared import alone

# By batches of 8 the last one has a row for the first replica alone.
RNG = np.random.RandomState(7)
X = RNG.randn(17, 4).astype("float32")
Y = RNG.randn(17, 1).astype("float32")


def base():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(5, "tanh")(inputs))


def head(body):
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(body(inputs)))


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def fit(model, **options):
    history = model.fit(X, Y, batch_size=8, verbose=0, **options).history
    return list(history.values())


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v.value)) for v in variables]


def same(use, strategy):
    """Compares what a life of models gives on one device and with a strategy."""
    found = []
    for s in (None, strategy):
        keras.utils.set_random_seed(1)
        found.append(use(s))
    assert largest(*found) < WEIGHTS


# --- in parts


class Wrapper(keras.Model):
    """A model around another one, as a trainer of one's own is."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def call(self, x, training=False):
        return self.body(x, training=training)


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.needs_patch("Layer.__new__", backend="torch", case="wrapper")
@pytest.mark.parametrize("inside", ["body", "wrapper", "body and wrapper"])
def test_wrapper_model(inside, two):
    """It is enough that one of both is made in the scope."""

    def use(strategy):
        with scope(strategy if "body" in inside else None):
            body = head(base())
        with scope(strategy if "wrapper" in inside else None):
            wrapper = Wrapper(body)
        logs = fit(compiled(wrapper))
        predicted = wrapper.predict(X, batch_size=8, verbose=0)
        if strategy is not None:
            for variable in [*wrapper.variables, *wrapper.optimizer.variables]:
                components = strategy.experimental_local_results(variable)
                assert len(components) == 2
        return [*state(wrapper), *logs, predicted]

    same(use, two)


@pytest.mark.full(keep_on="tensorflow")
def test_submodels_train_separately(two):
    """The encoder of an autoencoder, a model of its own, shares the variables."""

    def use(strategy):
        with scope(strategy):
            body = base()
            whole = compiled(head(body))
        logs = fit(whole)
        features = body.predict(X, batch_size=8, verbose=0)
        body.compile("sgd", "mse")
        logs += fit_to(body, features * 0.5)
        logs += fit(whole)
        return [*state(whole), features, *logs]

    def fit_to(model, y):
        history = model.fit(X, y, batch_size=8, verbose=0).history
        return list(history.values())

    same(use, two)


class Deferred(keras.Model):
    """Makes its layers in `build`, which a call may come to long after the scope."""

    def build(self, shape):
        self.hidden = keras.layers.Dense(5, "tanh")
        self.hidden.build(shape)
        self.scale = self.add_weight(shape=(5,), initializer="ones", name="scale")
        self.out = keras.layers.Dense(1)
        self.out.build((None, 5))

    def call(self, x):
        return self.out(self.hidden(x) * self.scale)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("first", ["fit", "evaluate", "call"])
def test_lazily_built_model(first, two):
    def use(strategy):
        with scope(strategy):
            model = compiled(Deferred())
        {
            "fit": lambda: fit(model),
            "evaluate": lambda: model.evaluate(X, Y, batch_size=8, verbose=0),
            "call": lambda: model(X),
        }[first]()
        logs = fit(model)
        return [*state(model), *logs]

    same(use, two)


# --- copies


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize("original_inside", [True, False])
def test_cloned_model(original_inside, two):
    def use(strategy):
        with scope(strategy if original_inside else None):
            original = compiled(head(base()))
        fit(original)
        before = original.get_weights()
        with scope(strategy):
            clone = keras.models.clone_model(original)
        clone.set_weights(before)
        logs = fit(compiled(clone))
        assert largest(before, original.get_weights()) == 0
        return [*state(clone), *logs]

    same(use, two)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("duplicate, inside", [(copy.deepcopy, True), (pickled, False)])
def test_deep_copied_model(duplicate, inside, two):
    """It is of the scope that it is made in, as one out of a file is."""

    def use(strategy):
        with scope(strategy):
            model = compiled(head(base()))
        fit(model)
        with scope(strategy if inside else None):
            second = duplicate(model)
        before = state(model)
        logs = fit(second)
        assert largest(before, state(model)) == 0
        if strategy is not None:
            for variable in second.trainable_variables:
                components = strategy.experimental_local_results(variable)
                assert len(components) == (2 if inside else 1)
        return [*state(second), *logs]

    same(use, two)


# --- transfer learning


@pytest.mark.full(keep_on="torch")
def test_transfer_learning(two):
    """A base trained elsewhere, frozen, then fine-tuned with a small rate."""

    def use(strategy):
        body = base()
        pretrained = compiled(head(body))
        fit(pretrained)
        with scope(strategy):
            copied = keras.models.clone_model(body)
            copied.set_weights(body.get_weights())
            copied.trainable = False
            model = compiled(head(copied))
        logs = fit(model)
        assert largest(copied.get_weights(), body.get_weights()) == 0
        copied.trainable = True
        model.compile(keras.optimizers.SGD(0.01), "mse")
        logs += fit(model)
        assert largest(copied.get_weights(), body.get_weights()) > 0
        return [*state(model), *logs]

    same(use, two)


# --- side by side


@pytest.mark.full(keep_on="tensorflow")
def test_two_models_train_alternately(mirrored):
    """Under different strategies, and one without, each as if it were alone."""
    strategies = {"two": mirrored(2), "none": None, "three": mirrored(3)}
    models = {}
    for name, strategy in strategies.items():
        keras.utils.set_random_seed(1)
        with scope(strategy):
            models[name] = compiled(head(base()))
    for _ in range(2):
        for model in models.values():
            fit(model, shuffle=False, epochs=1)
            model.evaluate(X, Y, batch_size=8, verbose=0)
    states = {name: state(model) for name, model in models.items()}
    assert largest(states["none"], states["two"]) < WEIGHTS
    assert largest(states["none"], states["three"]) < WEIGHTS


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("replicas", [3, None], ids=["3replicas", "no strategy"])
def test_distillation(replicas, mirrored):
    """A callback that works with a model that is not of the fit's strategy."""
    first, second = replicas and mirrored(replicas), mirrored(2)

    class Ask(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            answers.append(teacher.predict(X, batch_size=8, verbose=0))
            assert ks.get_strategy() is second

    answers = []
    keras.utils.set_random_seed(1)
    with scope(first):
        teacher = compiled(head(base()))
    expected = teacher.predict(X, batch_size=8, verbose=0)
    keras.utils.set_random_seed(2)
    with second.scope():
        student = compiled(head(base()))
    fit(student, epochs=2, callbacks=[Ask()])
    assert largest([expected] * 2, answers) == 0
    # In a scope of the user's own it stays refused, as everywhere.
    with second.scope(), pytest.raises((RuntimeError, ValueError), match="scope"):
        fit(student, callbacks=[Ask()])


@pytest.mark.needs_patch("Model.compile", backend="torch")
def test_callback_compiles_and_fits_plain_model(two):
    class FitPlain(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            plain.compile("adam", "mse")
            fit(plain, epochs=1)

    plain = head(base())
    with two.scope():
        model = compiled(head(base()))
    fit(model, epochs=1, callbacks=[FitPlain()])
    variables = plain.optimizer.variables
    assert not any(map(two.extended.variable_created_in_scope, variables))


# --- how steps are executed


def test_explicit_compile_defaults(two):
    def make():
        options = {"jit_compile": "auto", "steps_per_execution": 1}
        return compiled(head(base()), auto_scale_loss=False, **options)

    one = alone(make, X, Y, predicted=0)
    assert_equal(one, train(two, make, X, Y, predicted=0))


@pytest.mark.full(keep_on="jax")
def test_steps_per_execution(two):
    """Callbacks see what they see on one device: the last step of each execution."""

    def use(strategy):
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"])),
        )
        with scope(strategy):
            model = compiled(head(base()), steps_per_execution=3)
        x, y = np.repeat(X, 2, 0), np.repeat(Y, 2, 0)
        fit = {"verbose": 0, "callbacks": [note], "shuffle": False}
        model.fit(x, y, batch_size=5, epochs=2, **fit)  # 7 batches, the last of 4 rows
        model.fit(x, y, batch_size=11, **fit)  # 4 batches, the last of one row
        logs = model.evaluate(x, y, batch_size=5, verbose=0)
        predicted = model.predict(x, batch_size=5, verbose=0)
        return [*state(model), np.array(seen), logs, predicted]

    try:
        use(None)
    except ValueError as error:  # Keras up to 3.15 on torch
        with pytest.raises(ValueError, match=re.escape(str(error))):
            use(two)
        return
    same(use, two)
