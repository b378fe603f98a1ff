"""Virtual replicas in processes: the bits of one device."""

import random
import sys
import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner
from tests.processes import wait_until

VIRTUAL_REPLICAS = 6
ROWS = 29  # the last batch of 12 has 5 rows
RANDOM = np.random.RandomState(0)
WORDS = RANDOM.randint(0, 20, (ROWS, 7))
IMAGES = RANDOM.normal(2.0, 3.0, (ROWS, 8, 8, 2)).astype("float32")
WEIGHTS = RANDOM.uniform(0.1, 2.0, ROWS).astype("float32")
LABELS = RANDOM.randint(0, 3, ROWS)


def text(optimizer):
    """A masked LSTM."""
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, 6, mask_zero=True)(words)
    x = layers.Dropout(0.3)(layers.LSTM(5)(x))
    return keras.Model(words, layers.Dense(3)(x)), WORDS, optimizer


def attention(optimizer):
    """A transformer of one block."""
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, 8)(words)
    x += layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(x)
    x += layers.Dense(8)(layers.Dense(16, "gelu")(x))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(3, dtype="float32")(x)), WORDS, optimizer


def images(optimizer):
    """Convolutions with BatchNormalization; the dense weights exceed 2**14."""
    pixels = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(pixels)
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.5)(x))
    x = layers.Dense(80, "tanh")(layers.Flatten()(x))
    return keras.Model(pixels, layers.Dense(3)(x)), IMAGES, optimizer


# The model, the optimizer's arguments, the statistics of batches and the dtype policy.
PROGRAMS: dict[str, tuple] = {
    "text": (text, {"global_clipnorm": 0.5, "use_ema": True}, None, "float32"),
    "attention": (attention, {"clipvalue": 0.1}, None, "mixed_bfloat16"),
    "local images": (images, {"gradient_accumulation_steps": 2}, "local", "float32"),
    "images": (images, {}, None, "float32"),
}


def fit(
    name: str, strategy: Any, epochs: int = 2, callbacks: tuple = ()
) -> dict[str, Any]:
    """Trains a program; returns what has to have the same bits."""
    make, arguments, _, policy = PROGRAMS[name]
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            optimizer = keras.optimizers.AdamW(0.01, **arguments)
            model, x, optimizer = make(optimizer)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    history = model.fit(
        x,
        LABELS,
        sample_weight=WEIGHTS,
        batch_size=12,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
    )
    predictions = model.predict(x[:13], batch_size=12, verbose=0)
    return {
        "fingerprint": str(ks.fingerprint(model)),
        "logs": history.history,
        "evaluated": model.evaluate(x, LABELS, batch_size=12, verbose=0),
        "predictions": predictions.tobytes(),
    }


def fit_each(names: list[str]) -> dict[str, Any]:
    """Trains programs as one of several workers."""
    return {
        name: fit(
            name,
            ks.MultiWorkerMirroredStrategy(
                batch_statistics=PROGRAMS[name][2], virtual_replicas=VIRTUAL_REPLICAS
            ),
        )
        for name in names
    }


def fit_with_backups(folder: str) -> dict[str, Any]:
    """Trains 40 epochs as one of several workers, and backs up each step."""
    backup = ks.callbacks.BackupAndRestore(folder, save_freq=1)
    strategy = ks.MultiWorkerMirroredStrategy(virtual_replicas=VIRTUAL_REPLICAS)
    return fit("text", strategy, epochs=40, callbacks=(backup,))


if get_engine().virtual_replicas_unsupported_reason() is not None:
    pytest.skip("without virtual replicas", allow_module_level=True)


def on_one_device(name, **arguments):
    strategy = ks.MirroredStrategy(
        ["cpu:0"],
        batch_statistics=PROGRAMS[name][2],
        virtual_replicas=VIRTUAL_REPLICAS,
    )
    return fit(name, strategy, **arguments)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize(
    ("workers", "devices", "names"),
    [
        (2, 1, "text,images"),
        (2, 1, "attention,local images"),
        (3, 1, ",".join(PROGRAMS)),
        (3, 2, ",".join(PROGRAMS)),
    ],
)
def test_workers_have_bits_of_one_device(workers, devices, names, starter):
    with WorkerRunner(workers, devices, timeout_seconds=300, starter=starter) as runner:
        found = runner.run(fit_each, names.split(","))
    for name in names.split(","):
        expected = on_one_device(name)
        for worker in found:
            assert worker[name] == expected


@pytest.mark.full
def test_killed_worker_and_resume_on_fewer(starter, tmp_path):
    moments = random.Random(time.time_ns())
    rank, delay = moments.randrange(3), moments.uniform(0.0, 1.0)
    print(f"worker {rank} is killed {delay:.3f} s after the first backup")
    with WorkerRunner(3, timeout_seconds=200, starter=starter) as runner:
        runner.start(__file__, tmp_path)
        wait_until((tmp_path / "backup-000000002.npz").exists, 150)
        time.sleep(delay)
        runner.kill(rank)
        runner.wait()
    assert list(tmp_path.glob("backup-*.npz"))
    with WorkerRunner(2, timeout_seconds=200, starter=starter) as runner:
        resumed = runner.run(fit_with_backups, str(tmp_path))
    whole = on_one_device("text", epochs=40)
    for worker in resumed:
        assert worker["fingerprint"] == whole["fingerprint"]
        assert worker["predictions"] == whole["predictions"]


if __name__ == "__main__":
    fit_with_backups(sys.argv[1])
