"""What workers do whose devices share the state of a training."""

import contextlib
import copy
import importlib
from typing import Any

import keras
import numpy as np
from keras import layers

import keras_strategy as ks
from benchmarks.worker_memory import count_traffic
from keras_strategy.training import resume
from tests.distributed import jobs


def _compiled() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="tanh"),
            layers.Dropout(0.3, seed=3),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.1), "mse")
    return model


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    x = rng.randn(29, 6).astype("float32")
    return x, x[:, :1] * 2


def train(shard: str | None, folder: str, alone: bool = False) -> dict[str, Any]:
    """Trains, saves, goes on from a backup, and takes a step of its own.

    Args:
        shard: What is split.
        folder: Where files go.
        alone: Whether on one device, as the reference.
    """
    resume.MIN_SPILL_BYTES = 0  # of which this model has none
    if keras.backend.backend() == "jax":
        # As it makes variables of more than 250 MB on all devices together.
        core = importlib.import_module(keras.Variable.__mro__[1].__module__)
        core.should_shard_at_init = lambda layout, shape: not alone
    strategy: Any = None
    if not alone:
        strategy = jobs.make_strategy(shard=shard)
        rank = strategy.extended.local_replicas.start
    # Workers that make other first values take the chief's.
    keras.utils.set_random_seed(1 if alone or rank == 0 else 7)
    with contextlib.nullcontext() if alone else strategy.scope():
        model = _compiled()
    keras.utils.set_random_seed(1)
    x, y = _data()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    fitted = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
    result: dict[str, Any] = {"fitted": fitted}
    if alone:
        return result
    model.save(f"{folder}/model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(f"{folder}/model.keras")
    slots = loaded.optimizer.variables
    result["loaded"] = [*loaded.get_weights(), *(v.numpy() for v in slots)]
    result["bytes"] = strategy.memory_report(loaded)
    for variable, other in zip(loaded.variables, model.variables, strict=True):
        variable.assign(other.numpy())  # a file holds no states of seeds
    for each, name in ((loaded, "loaded"), (model, "model")):
        keras.utils.set_random_seed(2)
        backup = ks.callbacks.BackupAndRestore(f"{folder}/{name}")
        each.fit(x, y, batch_size=12, shuffle=False, verbose=0, callbacks=[backup])
    result["apart"] = max(
        np.abs(a - b).max()
        for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True)
    )

    def step(x, y):
        def loss(x, y):
            return keras.ops.sum((model(x, training=False) - y) ** 2)

        value, gradients = ks.value_and_grad(loss, model.trainable_variables)(x, y)
        model.optimizer.apply(gradients, model.trainable_variables)
        return value

    if keras.backend.backend() != "jax":
        result["sent"] = count_traffic(least=100)
    for batch in strategy.experimental_distribute_dataset([(x[:12], y[:12])] * 2):
        loss = strategy.run(step, batch)
    result["sent"] = dict(result.get("sent", {}))  # what is read below is more
    result["loss"] = float(strategy.reduce("sum", loss, axis=None))
    result["stepped"] = model.get_weights()
    copies = [copy.deepcopy(model.layers[0].kernel), copy.deepcopy(slots[-1])]

    def write():
        for each in copies:
            each.assign(keras.ops.ones(each.shape))

    strategy.run(write)
    result["copies"] = [each.numpy() for each in copies]
    return result
