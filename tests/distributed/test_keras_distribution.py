"""Models that Keras's own distribution of torch models has saved, and will load."""

import importlib
import os
from typing import Any

import keras
import numpy as np
import pytest

from keras_strategy.cluster_resolver import TFConfigClusterResolver
from keras_strategy.testing import WorkerRunner

BATCH = 14
X = np.random.RandomState(7).randn(2 * BATCH, 4).astype("float32")
Y = np.random.RandomState(8).randn(2 * BATCH, 1).astype("float32")


def make() -> keras.Model:
    layers = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def state(model: keras.Model) -> list[np.ndarray]:
    """Return the values of a model's and its optimizer's variables."""
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def load_train_and_save(source: str, target: str) -> tuple:
    """Load a model that a strategy saved, train it, and save it."""
    tf: Any = importlib.import_module("tensorflow")
    resolver = TFConfigClusterResolver()
    spec, rank = resolver.cluster_spec(), resolver.task_id
    host, port = spec.task_address("worker", 0).split(":")
    size = str(spec.num_tasks("worker"))
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": size}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.saving.load_model(source)
    loaded = state(model)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), verbose=0)
    if rank == 0:
        model.save(target)
    return loaded, state(model)


def test_saved_models_load_on_the_other_side(two, tmp_path):
    if keras.backend.backend() != "torch":
        pytest.skip("on JAX one process tests it")
    if not hasattr(keras.Model, "_initialize_ddp"):
        pytest.skip("this version of Keras distributes no torch models")
    with two.scope():
        model = make()
    model.fit(X, Y, batch_size=11, verbose=0)
    paths = str(tmp_path / "ours.keras"), str(tmp_path / "theirs.keras")
    model.save(paths[0])
    with WorkerRunner(2, timeout_seconds=300) as runner:
        chief, other = runner.run(load_train_and_save, *paths)
    for loaded, _ in (chief, other):
        for a, b in zip(state(model), loaded, strict=True):
            np.testing.assert_array_equal(a, b)
    with two.scope():
        again = keras.saving.load_model(paths[1])
    for a, b in zip(chief[1], state(again), strict=True):
        np.testing.assert_array_equal(a, b)
    again.fit(X, Y, batch_size=11, verbose=0)
