"""Strategies beside `keras.distribution`, and checkpoints of `OrbaxCheckpoint`."""

import contextlib
import importlib
import inspect

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import scope, train

X = np.random.RandomState(7).randn(14, 4).astype("float32")
Y = np.random.RandomState(8).randn(14, 1).astype("float32")
# Each leaves the last batch uneven on two devices, or not: `DataParallel` needs that.
UNEVEN, EVEN = 8, 7


def make() -> keras.Model:
    """Make a model whose names are the same each time, as `OrbaxCheckpoint` needs."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, "tanh", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1, name="out"),
        ],
        name="model",
    )
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", metrics=["mae"])
    return model


def data_parallel() -> keras.distribution.DataParallel:
    devices = ["cpu:0", "cpu:1"]
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], devices)
    return keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)


class UserDistribution(keras.distribution.DataParallel.__base__):
    """A distribution that each version of Keras can make on each backend."""

    def __init__(self):
        super().__init__(
            keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:1"])
        )


@contextlib.contextmanager
def set_for_process(distribution):
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


USES = {
    "scope": lambda strategy, model: strategy.scope().__enter__(),
    "fit": lambda strategy, model: model.fit(X, Y, verbose=0),
    "evaluate": lambda strategy, model: model.evaluate(X, Y, verbose=0),
    "predict": lambda strategy, model: model.predict(X, verbose=0),
    "train_on_batch": lambda strategy, model: model.train_on_batch(X, Y),
    "run": lambda strategy, model: strategy.run(lambda: 1),
}


@pytest.mark.full(keep=3, keep_on="jax")
@pytest.mark.parametrize("method", USES)
@pytest.mark.parametrize("activate", [set_for_process, UserDistribution.scope])
def test_active_distribution_is_refused(method, activate, two):
    with two.scope():
        model = make()
    before = model.get_weights()
    with activate(UserDistribution()), pytest.raises(RuntimeError) as error:
        USES[method](two, model)
    message = str(error.value)
    assert f"`{method}` of {two!r}" in message
    assert "the distribution UserDistribution is active" in message
    assert "`keras.distribution.set_distribution(None)`" in message
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(X, Y, batch_size=UNEVEN, verbose=0)  # it is not active any more


def test_distribution_set_in_scope_is_refused(two):
    with two.scope():
        model = make()
        with set_for_process(UserDistribution()), pytest.raises(RuntimeError):
            model.fit(X, Y, verbose=0)


class Distributed:
    """`keras.distribution.DataParallel` as something that has a `scope()`."""

    def __init__(self):
        self._distribution = data_parallel()

    def scope(self):
        return self._distribution.scope()


def skip_without_data_parallel():
    if keras.backend.backend() != "jax":
        pytest.skip("in one process, Keras distributes on JAX alone")


def test_model_without_strategy_keeps_its_distribution(two):
    skip_without_data_parallel()
    one = train(None, make, X, Y, EVEN * 2)
    distribution = Distributed()
    with distribution.scope():
        many = train(distribution, make, X, Y, EVEN * 2)
    sharding = many.model.trainable_variables[0].value.sharding
    assert len(sharding.device_set) == 2
    for a, b in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def skip_without_orbax():
    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        pytest.skip("this version of Keras has no OrbaxCheckpoint")
    pytest.importorskip("orbax.checkpoint")


def can_load_from_orbax() -> bool:
    """Return False if Keras finds the weights of a checkpoint by chance."""
    # Keras 3.14 on JAX lets Orbax choose an item while a distribution is active. Its
    # own DataParallel cannot load a checkpoint either.
    module = importlib.import_module("keras.src.saving.orbax_util")
    names_item = "checkpointable_name" in inspect.getsource(module)
    return names_item or keras.backend.backend() != "jax"


def orbax_checkpoint(folder, **options):
    skip_without_orbax()
    return keras.callbacks.OrbaxCheckpoint(str(folder), **options)


def fit(strategy, model, callbacks=(), batch_size=EVEN * 2):
    # Keras's distribution must be active, and a strategy's scope may be.
    with scope(strategy):
        model.fit(
            *(X, Y, batch_size, 2, 0),
            callbacks=list(callbacks),
            shuffle=False,
        )


def save_and_load(how, saver, loader, folder):
    """Train under `saver`, save, load under `loader`, and train on."""
    folder.mkdir()
    keras.utils.set_random_seed(3)
    with scope(saver):
        model = make()
    callbacks = [orbax_checkpoint(folder)] if how == "orbax" else []
    fit(saver, model, callbacks)
    with scope(saver):
        if how == "model.keras":
            model.save(folder / how)
        elif how == "model.weights.h5":
            model.save_weights(folder / how)
    with scope(loader):
        if how == "model.keras":
            loaded = keras.saving.load_model(folder / how)
        else:
            loaded = make()
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(folder if how == "orbax" else folder / how)
    fit(loader, loaded)
    return [*loaded.get_weights(), *map(np.array, loaded.optimizer.variables)]


@pytest.mark.needs_patch("Model.set_state_tree", backend="torch")
def test_orbax_checkpoint_of_unnamed_layers_is_refused(two, tmp_path):
    """Keras would keep the initial weights."""
    with two.scope():
        first, second = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in "12"
        )
        for model in (first, second):
            model.compile("sgd", "mse")
    first.fit(np.ones((4, 4)), np.ones(4), 4, callbacks=[orbax_checkpoint(tmp_path)])
    before = second.get_weights()
    with pytest.raises(ValueError, match=r"values of others: \['sequential.*a `name`"):
        second.load_weights(tmp_path)
    first.load_weights(tmp_path)
    for a, b in zip(before, second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_orbax_checkpoint_of_named_layers_loads(two, tmp_path):
    """Seed generators have no names, and begin anew."""

    def make_named():
        parts = keras.layers.Dropout(0.5), keras.layers.Dense(1, name="out")
        with two.scope():
            model = keras.Sequential([keras.Input((4,)), *parts], name="model")
            model.compile("sgd", "mse")
        return model

    first, second = make_named(), make_named()
    first.fit(np.ones((4, 4)), np.ones(4), 4, callbacks=[orbax_checkpoint(tmp_path)])
    second.load_weights(tmp_path)
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("how", ["model.keras", "model.weights.h5", "orbax"])
def test_saved_models_load_on_the_other_side(how, two, tmp_path):
    skip_without_data_parallel()
    if how == "orbax":
        skip_without_orbax()
        if not can_load_from_orbax():
            pytest.skip("this version of Keras cannot load it under a distribution")
    expected = save_and_load(how, None, None, tmp_path / "one")
    for name, sides in {
        "to a strategy": (Distributed(), two),
        "from a strategy": (two, Distributed()),
    }.items():
        found = save_and_load(how, *sides, tmp_path / name)
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("in_background", [False, True])
def test_orbax_checkpoint_continues_training(in_background, tmp_path):
    def use(strategy, folder):
        keras.utils.set_random_seed(3)
        with scope(strategy):
            model, loaded = make(), make()
        options = {"save_on_background": in_background, "max_to_keep": 1}
        fit(strategy, model, [orbax_checkpoint(folder, **options)], UNEVEN)
        assert [path.name for path in folder.iterdir()] == ["1"]  # the last epoch
        if not can_load_from_orbax():
            return []
        with scope(strategy):
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(folder)
        assert int(loaded.optimizer.iterations) == 4
        fit(strategy, loaded, (), UNEVEN)
        return [*loaded.get_weights(), *map(np.array, loaded.optimizer.variables)]

    expected = use(None, tmp_path / "one")
    for replicas in 2, 3:
        strategy = ks.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
        found = use(strategy, tmp_path / f"{replicas}")
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
