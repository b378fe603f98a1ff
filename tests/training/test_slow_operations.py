"""First steps, and a chief that writes, say after a while that they go on."""

import logging
import threading
import types

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.cluster import watchdog
from keras_strategy.training.saving import run_on_chief

SOON = 60


class Said(logging.Handler):
    """What was logged, and where a step waits until something is."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        self._some = threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self._some.set()

    def wait(self):
        assert self._some.wait(SOON)


said = Said()


@pytest.fixture(autouse=True)
def listening(monkeypatch):
    global said
    said = Said()
    monkeypatch.setattr(watchdog, "SLOW_OPERATION_SECONDS", 0.05)
    watchdog.logger.addHandler(said)
    yield
    watchdog.logger.removeHandler(said)


class Slow(keras.Sequential):
    """Its steps are not done before it was said that they take long."""

    def train_step(self, *args):
        said.wait()
        return super().train_step(*args)

    def test_step(self, *args):
        said.wait()
        return super().test_step(*args)

    def predict_step(self, *args):
        said.wait()
        return super().predict_step(*args)


@pytest.mark.full(keep_on="jax")
@pytest.mark.needs_patch("Model.make_train_function", backend="torch", case="fit-train")
@pytest.mark.needs_patch(
    "Model.make_test_function",
    backend="torch",
    case="evaluate-test",
)
@pytest.mark.needs_patch(
    "Model.make_predict_function",
    backend="torch",
    case="predict-predict",
)
@pytest.mark.parametrize(
    "method, kind", [("fit", "train"), ("evaluate", "test"), ("predict", "predict")]
)
def test_slow_first_step_is_logged(method, kind):
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = Slow([keras.Input((2,)), keras.layers.Dense(1)], name="slow")
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    data = (x,) if method == "predict" else (x, x[:, :1])
    line = (
        f"The first {kind} step of the model 'slow', which builds and compiles what "
        "later ones use, has taken 0.05 s so far."
    )
    for _ in range(2):
        getattr(model, method)(*data, batch_size=4, verbose=0)
        assert [text for text in said.lines if "so far" in text] == [line]


def slow(x):
    said.wait()
    return x * 2.0


def test_slow_first_run_is_logged():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    for _ in range(2):
        strategy.run(slow, (np.ones(3, "float32"),))
        assert said.lines == [
            "The first call of `slow` by strategy.run, which builds and compiles what "
            "later ones use, has taken 0.05 s so far."
        ]


def test_slow_write_of_chief_is_logged():
    def cluster(rank):
        return types.SimpleNamespace(
            names=("chief", "worker 0"),
            rank=rank,
            is_chief=rank == 0,
            client=types.SimpleNamespace(timeout_seconds=600),
            exchange=lambda operation, value, seconds: [None, None],
        )

    run_on_chief(cluster(1), "`save` to a.keras", said.wait)
    assert not said.lines
    run_on_chief(cluster(0), "`save` to a.keras", said.wait)
    assert said.lines == ["chief: `save` to a.keras has taken 0.05 s so far."]
