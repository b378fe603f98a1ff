"""Fits after one another, with changes between them, and models that go elsewhere."""

import keras
import numpy as np
import pytest

from tests.equality.compare import LOGS, WEIGHTS, largest, scope

pytestmark = pytest.mark.full(keep=1)

X = np.random.RandomState(7).randn(17, 4).astype("float32")
Y = np.random.RandomState(8).randn(17, 1).astype("float32")
BACKEND = keras.backend.backend()


def sequential():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, "tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(1),
        ]
    )


def quickly(strategy):
    """TensorFlow on one device compiles no step, which it would run a few times."""
    return {"run_eagerly": BACKEND == "tensorflow" and strategy is None}


def fit(model, **options):
    history = model.fit(X, Y, batch_size=8, verbose=0, **options).history
    return [value for values in history.values() for value in values]


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(v.numpy()) for v in variables]


def a_life(strategy):
    """One model, fitted again and again with changes between.

    Returns:
        By what was changed, the variables and the logs after it.
    """
    keras.utils.set_random_seed(1)
    how = quickly(strategy)
    with scope(strategy):
        model = sequential()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **how)
    found = {"first fit": (fit(model, epochs=2), state(model))}
    found["fit after fit"] = (fit(model, initial_epoch=1, epochs=2), state(model))
    model.optimizer.learning_rate = 0.05
    found["another learning rate"] = (fit(model), state(model))
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(momentum, "mae", metrics=["mse"], **how)
    found["compiled again"] = (fit(model), state(model))
    model.layers[0].trainable = False
    model.compile(keras.optimizers.Adam(0.01), "mse", **how)
    frozen = model.layers[0].get_weights()
    found["a frozen layer"] = (fit(model), state(model))
    assert largest(frozen, model.layers[0].get_weights()) == 0
    model.layers[0].trainable = True
    model.compile(keras.optimizers.Adam(0.01), "mse", **how)
    found["unfrozen"] = (fit(model), state(model))
    assert largest(frozen, model.layers[0].get_weights()) > 0
    model.set_weights([w * 0.5 for w in model.get_weights()])
    found["set weights"] = (fit(model), state(model))
    evaluated = model.evaluate(X, Y, batch_size=8, verbose=0)
    found["evaluated"] = ([evaluated], state(model))
    return found


@pytest.mark.full(keep_on="torch")
def test_changes_between_fits(mirrored):
    one, many = a_life(None), a_life(mirrored(3))
    for change, (logs, variables) in one.items():
        assert largest(logs, many[change][0]) <= LOGS, change
        assert largest(variables, many[change][1]) <= WEIGHTS, change


def test_weights_transfer_to_plain_model_and_back(two):
    """Trained in turns with and without replicas, as if always on one device."""

    def in_turns(strategies):
        keras.utils.set_random_seed(1)
        weights = None
        for strategy in strategies:
            with scope(strategy):
                model = sequential()
                model.compile(keras.optimizers.SGD(0.05), "mse", **quickly(strategy))
            if weights is not None:
                model.set_weights(weights)
            fit(model, shuffle=False)
            weights = model.get_weights()
        return weights

    expected = in_turns([None, None, None])
    assert largest(expected, in_turns([two, None, two])) <= WEIGHTS
    assert largest(expected, in_turns([None, two, None])) <= WEIGHTS


def exported(model, folder):
    """What an exported model gives for X, asked without Keras's model."""
    if BACKEND == "torch":
        import torch

        try:
            model.export(folder / "model.pt2", format="torch", verbose=False)
        except ValueError as error:
            if "Unrecognized format" not in str(error):
                raise
            pytest.skip("this Keras exports no torch program")
        program = torch.export.load(folder / "model.pt2").module()
        # Keras exports a program that takes one row there.
        rows = [program(row[None]) for row in torch.from_numpy(X)]
        return torch.cat(rows).detach().numpy()
    # Keras writes a SavedModel with it, also on JAX.
    tf = pytest.importorskip("tensorflow")

    model.export(folder / "model", format="tf_saved_model", verbose=False)
    artifact = tf.saved_model.load(folder / "model")
    return artifact.serve(X).numpy()


def test_exported_model_equals_model(two, tmp_path):
    outputs = []
    for strategy in (None, two):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = sequential()
            model.compile("adam", "mse")
        fit(model)
        folder = tmp_path / str(len(outputs))
        folder.mkdir()
        outputs.append(exported(model, folder))
        assert largest([model.predict(X, verbose=0)], [outputs[-1]]) <= LOGS
        fit(model)  # exporting leaves it able to train
    assert largest([outputs[0]], [outputs[1]]) <= LOGS
