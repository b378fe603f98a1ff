"""Files are the same with a scope and without."""

import keras
import numpy as np
import pytest

from tests.equality.compare import largest

X = np.random.RandomState(7).randn(13, 4).astype("float32")
Y = np.random.RandomState(8).randn(13, 1).astype("float32")


def compiled():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v.value) for v in variables]


def fitted(strategy=None):
    if strategy is None:
        model = compiled()
    else:
        with strategy.scope():
            model = compiled()
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


@pytest.mark.full(keep=3, keep_on="jax")
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("save_inside", [False, True])
@pytest.mark.parametrize("load_inside", [False, True])
def test_saved_model_loads(name, save_inside, load_inside, two, tmp_path):
    path = tmp_path / name
    model = fitted(two if save_inside else None)

    def load():
        if name.endswith(".keras"):
            model.save(path)
            return keras.saving.load_model(path)
        model.save_weights(path)
        loaded = compiled()
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
        return loaded

    if load_inside:
        with two.scope():
            loaded = load()
    else:
        loaded = load()
    assert largest(state(model), state(loaded)) == 0
    for variable in loaded.variables if load_inside else ():
        for component in two.experimental_local_results(variable):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(component),
                keras.ops.convert_to_numpy(variable.value),
            )
    # And both go on in the same way.
    for m in (model, loaded):
        m.predict(X, verbose=0)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), loaded.predict(X, verbose=0), atol=1e-6
    )


@pytest.mark.full(keep_on="tensorflow")
def test_training_continues_on_other_devices(mirrored, tmp_path):
    path = tmp_path / "model.keras"
    layers = [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
    with mirrored(2).scope():
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(path)
    with mirrored(3).scope():
        other = keras.saving.load_model(path)
    plain = keras.saving.load_model(path)
    for m in (other, plain):
        m.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    assert largest(state(plain), state(other)) < 2e-5


def test_clones_belong_to_their_scope(two):
    model = fitted()
    with two.scope():
        clone = keras.models.clone_model(model)
    assert all(two.extended.variable_created_in_scope(v) for v in clone.variables)
    assert not any(two.extended.variable_created_in_scope(v) for v in model.variables)
