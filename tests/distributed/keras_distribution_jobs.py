"""Jobs of processes under Keras's own `DataParallel` on torch."""

import importlib
import os
from typing import Any

import keras
import numpy as np

from keras_strategy.cluster_resolver import TFConfigClusterResolver

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
