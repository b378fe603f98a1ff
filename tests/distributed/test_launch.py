"""`keras_strategy.launch`: a function in local worker processes."""

import json
import os

import keras
import numpy as np
import pytest

import keras_strategy as ks

EPOCHS = 2


def make_trainer():
    """Return a function that no module has, as in a notebook."""
    rows = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")

    def train(epochs, verbose, make_strategy=ks.MultiWorkerMirroredStrategy):
        strategy = make_strategy()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile("adam", "mse")
        model.fit(rows, rows[:, :2], batch_size=8, epochs=epochs, verbose=verbose)
        print("trained by", os.environ.get("TF_CONFIG", "")[-30:])
        return strategy.num_replicas_in_sync, model.get_weights()

    return train


@pytest.mark.full(keep_on="tensorflow")
def test_launched_workers_match_one_device(capfd):
    train = make_trainer()
    replicas, weights = ks.launch(train, (EPOCHS,), {"verbose": 2}, workers=2)
    printed = capfd.readouterr().out
    assert replicas == 2
    assert f"Epoch {EPOCHS}/{EPOCHS}" in printed
    # The output of the chief, and of no other worker.
    assert printed.count("trained by") == 1 and '"index": 0' in printed
    _, expected = train(EPOCHS, 0, lambda: ks.OneDeviceStrategy("cpu:0"))
    for ours, one in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-6)


def test_error_of_a_worker_is_raised():
    def fail():
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise LookupError("a bad row")

    with pytest.raises(LookupError, match="a bad row") as raised:
        ks.launch(fail, workers=2)
    # With the line that raised it.
    assert 'raise LookupError("a bad row")' in "".join(raised.value.__notes__)


def test_killed_worker_is_reported():
    def kill():
        print("the last words")
        os.abort()

    with pytest.raises(ks.testing.WorkerFailed, match="SIGABRT[^$]*the last words"):
        ks.launch(kill, workers=1)


def test_worker_cannot_launch(monkeypatch):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"type": "worker", "index": 0}
    config = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(RuntimeError, match="one already: TF_CONFIG"):
        ks.launch(make_trainer, workers=2)


@pytest.mark.parametrize("workers", [0, 1.5, "two", "auto"])
def test_bad_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match=f"workers={workers!r}"):
        ks.launch(make_trainer, workers=workers)


def test_bad_number_of_gpus_is_refused():
    with pytest.raises(ValueError, match="gpus_per_worker=1000"):
        ks.launch(make_trainer, workers=2, gpus_per_worker=1000)
