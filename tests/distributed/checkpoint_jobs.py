"""Workers that write checkpoints of their shards, and load them."""

import sys
from typing import Any

import keras
import numpy as np

from keras_strategy.callbacks import ShardedCheckpoint, load_checkpoint
from keras_strategy.training import checkpoint
from tests.distributed.jobs import classifier, digits, make_strategy

RATE = 1e-4


def _values(model: Any) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(variable.numpy()) for variable in variables]


def write(
    folder: str, shard: str | None, asynchronous: bool = True, strategy: Any = None
) -> list[np.ndarray]:
    """Train nine batches, with a checkpoint of every third; return the variables."""
    strategy = strategy or make_strategy(shard=shard)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = classifier()
    x, y = digits(21)
    saves = ShardedCheckpoint(folder, every=3, asynchronous=asynchronous)
    arguments: dict[str, Any] = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(x, y, epochs=3, callbacks=[saves], **arguments)
    return _values(model)


def load(folder: str, shard: str | None, strategy: Any = None) -> dict[str, Any]:
    """Load the last checkpoint, and train on; return the variables before and after."""
    strategy = strategy or make_strategy(shard=shard)
    with strategy.scope():
        model = load_checkpoint(folder)
    before = _values(model)
    x, y = digits(29)
    keras.utils.set_random_seed(2)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return {"loaded": before, "trained": model.get_weights()}


def write_apart(folder: str, shard: str, asynchronous: bool) -> str:
    """Write into another folder on each worker; return the error."""
    checkpoint._VISIBLE_SECONDS = 0.5
    rank = make_strategy(shard=shard).extended.local_replicas.start
    try:
        write(f"{folder}/{rank}", shard, asynchronous)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def counting_model() -> keras.Model:
    """Return a model whose weights are 1 - RATE * k after k steps."""
    # Its gradients are constant, so Adam subtracts the learning rate.
    layer = keras.layers.Dense(500, kernel_initializer="ones", use_bias=False)
    model = keras.Sequential([keras.Input((500,)), layer])
    model.compile(keras.optimizers.Adam(RATE), loss=_sum)
    return model


def _sum(y: Any, predictions: Any) -> Any:
    return keras.ops.sum(predictions, axis=-1)


def train_until_killed(folder: str, shard: str) -> None:
    """Write a checkpoint after each batch."""
    with make_strategy(shard=shard).scope():
        model = counting_model()
    ones = np.ones((16, 500), "float32")
    saves = ShardedCheckpoint(folder, every=1)
    arguments: dict[str, Any] = {"batch_size": 16, "epochs": 10**6, "verbose": 0}
    model.fit(ones, ones[:, :1], callbacks=[saves], **arguments)


if __name__ == "__main__":
    train_until_killed(*sys.argv[1:])
