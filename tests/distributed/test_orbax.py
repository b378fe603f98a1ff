"""`keras.callbacks.OrbaxCheckpoint` in a training of several workers."""

import os

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.training.test_keras_distribution import (
    can_load_from_orbax,
    fit,
    make,
    skip_without_orbax,
)

pytestmark = pytest.mark.full(keep=1)


def train_and_load(folder: str, shard: str | None) -> tuple[list[str], list, list]:
    """Return the names of the checkpoints, and the state saved and loaded."""
    strategy = ks.MultiWorkerMirroredStrategy(shard=shard)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, loaded = make(), make()
    callback = keras.callbacks.OrbaxCheckpoint(
        folder, max_to_keep=None, save_on_background=shard is None
    )
    fit(strategy, model, [callback], batch_size=8)
    if not can_load_from_orbax():
        return sorted(os.listdir(folder)), [], []
    with strategy.scope():
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(folder)
    states = [
        [
            *map(np.array, m.get_weights()),
            *(np.array(v.numpy()) for v in m.optimizer.variables),
        ]
        for m in (model, loaded)
    ]
    return sorted(os.listdir(folder)), *states


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_workers_save_one_checkpoint(shard, two_workers, tmp_path):
    skip_without_orbax()
    results = two_workers.run(train_and_load, str(tmp_path / "folder"), shard)
    for names, saved, loaded in results:
        assert names == ["0", "1"]  # one of each epoch
        for a, b in zip(saved, loaded, strict=True):
            np.testing.assert_array_equal(a, b)
