"""`ShardedCheckpoint`, and `load_checkpoint` under other strategies."""

import logging
import shutil
import time

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from keras_strategy.callbacks import ShardedCheckpoint, load_checkpoint
from keras_strategy.core.registry import get_engine
from keras_strategy.training import checkpoint
from keras_strategy.training.checkpoint import SavedArrays

ENGINE = get_engine()
SHARDS = [
    shard
    for shard in (None, "optimizer", "parameters")
    if shard is None or not ENGINE.sharding_unsupported_reason(shard)
]
RNG = np.random.RandomState(0)
X = RNG.randn(29, 6).astype("float32")
Y = X[:, :3] * 2


def strategy(replicas, shard=None):
    devices = [f"cpu:{i}" for i in range(replicas)]
    return ks.MirroredStrategy(devices, shard=shard)


def compiled(optimizer=None):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=3),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer or keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


def made(replicas, shard=None, optimizer=None):
    keras.utils.set_random_seed(1)
    with strategy(replicas, shard).scope():
        return compiled(optimizer)


def fit(model, *callbacks, epochs=2):
    return model.fit(
        X, Y, batch_size=12, epochs=epochs, verbose=0, callbacks=list(callbacks)
    )


def values(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(variable.numpy()) for variable in variables]


def assert_equal(model, other):
    for a, b in zip(values(model), values(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("shard", SHARDS)
def test_checkpoint_loads_under_other_strategies(shard, tmp_path):
    model = made(4, shard)
    fit(model, ShardedCheckpoint(tmp_path))
    loaded = [load_checkpoint(tmp_path)]  # on one device, without a strategy
    assert not ks.has_strategy()
    for replicas, other in [(1, None), (2, SHARDS[-1]), (3, SHARDS[1])]:
        with strategy(replicas, other).scope():
            loaded.append(load_checkpoint(tmp_path))
        assert_equal(model, loaded[-1])
    trained = []
    for each in loaded:
        keras.utils.set_random_seed(2)
        each.fit(X, Y, batch_size=12, epochs=2, verbose=0)
        trained.append(each.get_weights())
    for weights in trained[1:]:
        for a, b in zip(trained[0], weights, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("shard", SHARDS)
def test_files_have_the_shards_of_each_replica(shard, tmp_path):
    model = made(3, shard)
    fit(model, ShardedCheckpoint(tmp_path))
    arrays = SavedArrays([sorted(tmp_path.iterdir())[-1]])
    sharded = {name for name in arrays if len(arrays._members[name]) > 1}
    assert ("model/0" in sharded) == (shard == "parameters")
    assert any(name.startswith("optimizer/") for name in sharded) == bool(shard)
    np.testing.assert_array_equal(arrays["model/0"], model.layers[0].kernel.numpy())


@pytest.mark.full(keep_on="tensorflow")
def test_checkpoint_becomes_a_plain_file(tmp_path):
    model = made(2, SHARDS[-1])
    fit(model, ShardedCheckpoint(tmp_path))
    load_checkpoint(tmp_path).save(tmp_path / "plain.keras")
    loaded = keras.saving.load_model(tmp_path / "plain.keras")
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    slots = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    for a, b in slots:
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.full(keep_on="torch")
def test_weights_alone_are_loaded_into_an_uncompiled_model(tmp_path):
    model = made(2, SHARDS[-1])
    fit(model, ShardedCheckpoint(tmp_path))
    other = keras.Sequential.from_config(model.get_config())
    assert load_checkpoint(tmp_path, other) is other
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_backup_and_restore_resumes_from_a_checkpoint(asynchronous, tmp_path):
    """Also within an epoch."""

    class Stopped(Exception):
        pass

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 5:
                raise Stopped

    whole = made(2, SHARDS[-1])
    fit(whole)
    model = made(2, SHARDS[-1])
    saves = ShardedCheckpoint(tmp_path, every=1, asynchronous=asynchronous)
    with pytest.raises(Stopped):
        fit(model, saves, Stop())
    resumed = made(2, SHARDS[-1])
    fit(resumed, ks.callbacks.BackupAndRestore(tmp_path))
    assert_equal(whole, resumed)


@pytest.mark.full(keep_on="torch")
def test_asynchronous_backup_is_what_the_step_left(tmp_path, monkeypatch):
    """The next step changes the variables before they are written."""
    kept, write = {}, checkpoint._write_file

    def write_late(*args):
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(checkpoint, "_write_file", write_late)

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kept[int(self.model.optimizer.iterations.numpy())] = values(self.model)

    model = made(2, SHARDS[-1])
    fit(model, ShardedCheckpoint(tmp_path, every=1, max_to_keep=9), Keep())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6
    for file in files:
        folder = tmp_path / file.stem
        folder.mkdir()
        shutil.copy(file, folder)
        loaded = load_checkpoint(folder)
        expected = kept[int(loaded.optimizer.iterations.numpy())]
        for a, b in zip(values(loaded), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.full(keep_on="jax")
def test_number_of_kept_checkpoints(tmp_path):
    fit(made(2), ShardedCheckpoint(tmp_path, every=1, max_to_keep=3))
    names = [f"backup-{number:09}.npz" for number in (4, 5, 6)]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    # Another training goes on counting.
    fit(made(2), ShardedCheckpoint(tmp_path, max_to_keep=1), epochs=1)
    assert [file.name for file in tmp_path.iterdir()] == ["backup-000000007.npz"]


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("epoch", [0, 1])
def test_failed_asynchronous_write_is_raised(epoch, tmp_path):
    """By the next checkpoint, or at the end."""
    folder = tmp_path / "checkpoints"

    def spoil(now, logs):
        if now == epoch:
            shutil.rmtree(folder, ignore_errors=True)
            folder.touch()

    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=spoil),
        ShardedCheckpoint(folder),
    ]
    with pytest.raises(OSError, match="checkpoints"):
        fit(made(2, SHARDS[-1]), *callbacks)


@pytest.mark.full(keep_on="jax")
def test_damaged_checkpoint_is_not_loaded(tmp_path, caplog):
    model = made(2, SHARDS[-1])
    fit(model, ShardedCheckpoint(tmp_path, every=3))
    *_, last = sorted(tmp_path.iterdir())
    content = bytearray(last.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    last.write_bytes(content)
    with caplog.at_level(logging.ERROR, "keras_strategy"):
        loaded = load_checkpoint(tmp_path)
    assert "is damaged" in caplog.text
    assert int(loaded.optimizer.iterations.numpy()) == 3


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`every` must be .* every=0"):
        ShardedCheckpoint(tmp_path, every=0)
    with pytest.raises(ValueError, match="max_to_keep=True"):
        ShardedCheckpoint(tmp_path, max_to_keep=True)
    with pytest.raises(RuntimeError, match="ShardedCheckpoint.*in the scope"):
        fit(compiled(), ShardedCheckpoint(tmp_path))
    two = ShardedCheckpoint(tmp_path), ks.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(ValueError, match="Received: ShardedCheckpoint, BackupAnd"):
        fit(made(2), *two)
    with pytest.raises(ValueError, match="path='.*', which has none"):
        load_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.full(keep_on="jax")
def test_another_model_is_refused(tmp_path):
    fit(made(2), ShardedCheckpoint(tmp_path))
    before = (other := made(2, optimizer="sgd")).get_weights()
    with pytest.raises(ValueError, match="another model or optimizer"):
        load_checkpoint(tmp_path, other)
    for a, b in zip(before, other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Subclassed(keras.Model):
    def __init__(self, size):
        super().__init__()
        self.out = layers.Dense(size)

    def call(self, x):
        return self.out(x)


class WithoutConfig(Subclassed):
    def get_config(self):
        raise NotImplementedError


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("kind", [Subclassed, WithoutConfig])
def test_model_without_configuration_must_be_given(kind, tmp_path):
    def make(replicas):
        with strategy(replicas, SHARDS[-1]).scope():
            model = kind(3)
            model.compile("adam", "mse")
            model(X)
        return model

    model = make(2)
    fit(model, ShardedCheckpoint(tmp_path))
    with pytest.raises(ValueError, match="pass it as argument `model`"):
        load_checkpoint(tmp_path)
    other = make(3)
    load_checkpoint(tmp_path, other)
    assert_equal(model, other)
