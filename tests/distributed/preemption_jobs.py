"""Loops of a program's own that save when a worker is told to end. See jobs.py."""

import os
import signal
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_strategy as ks
from tests.distributed.jobs import digits

STEPS = 6
HANDLER = ks.experimental.PreemptionCheckpointHandler


class Rows:
    """Batches one after the other, which says how many it has given."""

    def __init__(self):
        self.given = 0
        self.x, self.y = digits(STEPS * 4)

    def next(self):
        rows = slice(self.given * 4, self.given * 4 + 4)
        self.given += 1
        return self.x[rows], self.y[rows]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def train(
    strategy: Any, folder: str, seed: int, told_at: int | None, native: bool
) -> dict:
    """Trains a few steps.

    Args:
        strategy: The strategy.
        folder: Of the checkpoints.
        seed: Of the first weights, and of what NumPy draws.
        told_at: Before which step the last worker is told to end.
        native: Whether TensorFlow saves.

    Returns:
        The weights, which steps were run, and the exit code.
    """
    np.random.seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                # TensorFlow does not save the state of Keras's seed generators.
                *([] if native else [keras.layers.Dropout(0.3, seed=5)]),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
    start = np.random.RandomState(seed)
    for variable in model.trainable_variables:
        variable.assign(0.3 * start.randn(*variable.shape))
    rows = Rows()
    if native:
        import tensorflow as tf

        things = tf.train.Checkpoint(model=model, optimizer=optimizer)
    else:
        things = {"model": model, "optimizer": optimizer, "mean": mean, "data": rows}
    handler = HANDLER(strategy.cluster_resolver, things, folder)
    if native:
        rows.given = handler.total_run_calls

    def step(x, y):
        def loss():
            logits = model(x, training=True)
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, logits, True)
            )

        value, grads = ks.value_and_grad(loss, model.trainable_variables)()
        n = ks.get_replica_context().num_replicas_in_sync
        optimizer.apply([g / n for g in grads], model.trainable_variables)
        mean.update_state(value)

    ran, code = [], None
    try:
        with handler.watch_preemption_scope():
            for number in range(handler.total_run_calls, STEPS):
                last = strategy.extended.local_replicas[-1]
                if number == told_at and last == strategy.num_replicas_in_sync - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                # It may save first: the batch is read after that.
                handler.run(lambda: strategy.run(step, args=rows.next()))
                np.random.rand()
                ran.append(number)
    except SystemExit as end:
        code = end.code
    del handler
    variables = [*model.variables, *optimizer.variables]
    return {
        "weights": [ops.convert_to_numpy(v) for v in variables],
        "mean": float(mean.result()),
        "drawn": np.random.rand(),
        "ran": ran,
        "code": code,
    }


def whole_and_resumed(folder: str, native: bool = False) -> list[dict]:
    """A loop; one that is told to end; and what goes on from there."""
    strategy = ks.MultiWorkerMirroredStrategy()
    return [
        train(strategy, f"{folder}/whole", 1, None, native),
        train(strategy, f"{folder}/ended", 1, 3, native),
        train(strategy, f"{folder}/ended", 99, None, native),
    ]
