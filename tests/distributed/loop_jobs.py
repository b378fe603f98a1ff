"""A custom loop that saves every few steps and resumes. See jobs.py."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks
from tests.distributed.jobs import digits

EPOCHS, BATCHES = 3, 4  # of 8 rows; the last batch has 5


def train(folder: str, seed: int = 1, stop_at: int = 0, strategy: Any = None) -> dict:
    """Train with a shuffled dataset, Dropout and random numbers of NumPy.

    Args:
        folder: Where the loop saves after every third step.
        seed: Of the initial weights, the order of rows and all random numbers.
        stop_at: The number of steps after which the loop stops, as if it was killed.
        strategy: By default one of several workers.
    """
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
    x, y = digits(29)
    rows = ks.IndexedDataset(list(zip(x, y, strict=True)), 8, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(rows)

    def train_step(x, y):
        def compute_loss():
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            return ks.compute_average_loss(losses)

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(compute_loss, variables)()
        optimizer.apply(gradients, variables)
        mean.update_state(loss)

    manager = ks.CheckpointManager(
        {"model": model, "optimizer": optimizer, "mean": mean, "data": dataset}, folder
    )
    step = first = manager.restore_or_initialize()
    draws = []
    while step < EPOCHS * BATCHES:
        for batch in dataset:
            strategy.run(train_step, args=batch)
            draws.append(np.random.rand())
            step += 1
            if step % 3 == 0:
                manager.save(step)
            if step == stop_at:
                return {"steps": (first, step)}
    variables = [*model.variables, *optimizer.variables, *mean.variables]
    values = [ops.convert_to_numpy(variable) for variable in variables]
    return {"steps": (first, step), "values": values, "draws": draws}
