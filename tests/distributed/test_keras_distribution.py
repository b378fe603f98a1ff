"""Models that Keras's own distribution of torch models has saved, and will load."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import keras_distribution_jobs as jobs


def test_saved_models_load_on_the_other_side(two, tmp_path):
    if keras.backend.backend() != "torch":
        pytest.skip("on JAX one process tests it")
    if not hasattr(keras.Model, "_initialize_ddp"):
        pytest.skip("this version of Keras distributes no torch models")
    with two.scope():
        model = jobs.make()
    model.fit(jobs.X, jobs.Y, batch_size=11, verbose=0)
    paths = str(tmp_path / "ours.keras"), str(tmp_path / "theirs.keras")
    model.save(paths[0])
    with WorkerRunner(2, timeout_seconds=300) as runner:
        chief, other = runner.run(jobs.load_train_and_save, *paths)
    for loaded, _ in (chief, other):
        for a, b in zip(jobs.state(model), loaded, strict=True):
            np.testing.assert_array_equal(a, b)
    with two.scope():
        again = keras.saving.load_model(paths[1])
    for a, b in zip(chief[1], jobs.state(again), strict=True):
        np.testing.assert_array_equal(a, b)
    again.fit(jobs.X, jobs.Y, batch_size=11, verbose=0)
