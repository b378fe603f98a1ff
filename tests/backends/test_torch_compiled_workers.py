"""`jit_compile` on torch where each replica has a process."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import largest
from keras_strategy.testing import WorkerRunner

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

X = np.random.RandomState(0).randn(9, 6).astype("float32")
Y = np.random.RandomState(1).randn(9, 2).astype("float32")


def model_of(strategy, jit_compile: bool) -> keras.Model:
    """A model with all that a forward pass writes and draws."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(2),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=jit_compile)
    return model


def trained(strategy, jit_compile: bool) -> list:
    model = model_of(strategy, jit_compile)
    # The last batch has rows for the first replica alone.
    history = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return [*history.history["loss"], *model.get_weights()]


def with_and_without() -> list:
    """Return the results of `fit`, without and with `jit_compile`."""
    # A graph cannot communicate.
    strategy = ks.MultiWorkerMirroredStrategy(batch_statistics="local")
    return [trained(strategy, jit_compile) for jit_compile in (False, True)]


def failing() -> list:
    """A model's state before and after a step that fails behind the forward pass."""
    strategy = ks.MultiWorkerMirroredStrategy()
    model = model_of(strategy, True)

    class Boom(keras.losses.Loss):
        def call(self, y_true, y_pred):
            raise ArithmeticError("boom")

    model.train_on_batch(X[:4], Y[:4])
    before = [variable.numpy() for variable in model.variables]
    with strategy.scope():
        model.compile("adam", Boom(), jit_compile=True)
    try:
        model.train_on_batch(X[:4], Y[:4])
    except ArithmeticError:
        after = [variable.numpy() for variable in model.variables]
        return [before, after]
    raise AssertionError("it did not fail")


def of_a_users_own() -> list:
    """A layer's state after steps that a user has compiled, and what they returned.

    Without torch.compile and with it, and then once more after a step that failed.
    """
    strategy, found = ks.MultiWorkerMirroredStrategy(), []
    for compiles in (False, True):
        with strategy.scope():
            layer = keras.layers.BatchNormalization()
            layer.build((None, 6))

        def forward(x, layer=layer):
            return layer(x, training=True)

        compiled = torch.compile(forward, backend="eager") if compiles else forward

        def step(x, fails=False, forward=compiled):
            outputs = forward(x)
            if fails:
                raise ArithmeticError("boom")
            return outputs

        x = torch.from_numpy(X[:4])
        outputs = [strategy.run(step, args=(x,)) for _ in range(3)][-1]
        first = strategy.experimental_local_results(outputs)[0].detach().numpy()
        found.append([first, *layer.get_weights()])
        try:
            strategy.run(step, args=(x,), kwargs={"fails": True})
        except ArithmeticError:
            found.append([first, *layer.get_weights()])
    return found


def all_of_them() -> tuple[list, list, list]:
    """All of the above, since to import what compiles takes seconds."""
    return with_and_without(), failing(), of_a_users_own()


pytestmark = pytest.mark.full


def test_compiled_workers_equal_one_device(starter):
    with WorkerRunner(2, timeout_seconds=280, starter=starter) as runner:
        results = runner.run(all_of_them)
    for trained, failing, of_a_users_own in results:
        without, compiled = trained
        assert largest(compiled, without) == 0
        before, after = failing
        assert largest(after, before) == 0
        without, _, compiled, failed = of_a_users_own
        assert largest(compiled, without) < 1e-6
        assert largest(failed, compiled) == 0
