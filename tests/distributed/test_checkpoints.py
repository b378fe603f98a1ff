"""Checkpoints of several workers, each of which writes its shards."""

import pathlib
import random
import shutil
import sys
import time
from typing import Any

import keras
import numpy as np
import pytest

from keras_strategy.callbacks import ShardedCheckpoint, load_checkpoint
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner
from keras_strategy.training import checkpoint
from tests.distributed.jobs import classifier, digits, make_strategy
from tests.processes import wait_until

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


SHARDS = [
    shard
    for shard in ("optimizer", "parameters")
    if not get_engine().sharding_unsupported_reason(shard)
]


def assert_equal(some, others, tolerance=0.0):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def names(folder):
    return sorted(file.name for file in pathlib.Path(folder).iterdir())


@pytest.fixture(scope="module")
def written(starter, tmp_path_factory):
    """The folder of a checkpoint of two workers, and their variables."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        first, second = runner.run(write, str(folder), SHARDS[-1])
    assert_equal(first, second)
    return folder, first


@pytest.mark.full(keep_on="torch")
def test_each_worker_writes_its_shards(written):
    assert names(written[0]) == [
        f"backup-{number:09}.{kind}"
        for number in (2, 3)
        for kind in ("npz", "worker-1.npz")
    ]


@pytest.mark.full(keep_on="jax")
def test_checkpoint_loads_with_other_numbers_of_workers(written, starter, mirrored):
    folder, variables = written
    whole = load(str(folder), None, mirrored(1))
    assert_equal(variables, whole["loaded"])
    found = [load(str(folder), None, mirrored(3))]
    for workers, shard in (2, SHARDS[0]), (3, SHARDS[-1]):
        with WorkerRunner(workers, timeout_seconds=300, starter=starter) as runner:
            found += runner.run(load, str(folder), shard)
    for each in found:
        assert_equal(variables, each["loaded"])
        assert_equal(whole["trained"], each["trained"], 2e-5)


@pytest.mark.full(keep_on="torch")
def test_checkpoint_without_shards_loads_on_workers(starter, mirrored, tmp_path):
    """The folder may be the chief's alone."""
    variables = write(str(tmp_path), None, strategy=mirrored(2))
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for each in runner.run(load, str(tmp_path), SHARDS[-1]):
            assert_equal(variables, each["loaded"])


@pytest.mark.full(keep_on="torch")
def test_damaged_shards_are_not_loaded(written, starter, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(written[0], folder)
    shard = folder / "backup-000000003.worker-1.npz"
    content = bytearray(shard.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    shard.write_bytes(content)
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        found = runner.run(load, str(folder), SHARDS[-1])
    assert_equal(found[0]["loaded"], found[1]["loaded"])
    assert "backup-000000003.npz.damaged" in names(folder)
    model = load_checkpoint(folder)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert_equal(found[0]["loaded"][:2], model.get_weights()[:2])


@pytest.mark.parametrize("is_missing", [True, False])
def test_one_process_checks_all_shards(is_missing, written, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(written[0], folder)
    shard = folder / "backup-000000003.worker-1.npz"
    if is_missing:
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    assert int(load_checkpoint(folder).optimizer.iterations.numpy()) == 6
    assert "backup-000000003.npz.damaged" in names(folder)


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_folders_that_are_not_shared(asynchronous, starter, tmp_path):
    with WorkerRunner(2, timeout_seconds=40, starter=starter) as runner:
        errors = runner.run(
            write_apart, str(tmp_path), SHARDS[-1], asynchronous=asynchronous
        )
    assert all("Expected a folder that all workers share" in e for e in errors), errors


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("moment", range(10))
def test_killed_worker_leaves_a_checkpoint(moment, starter, tmp_path):
    """All variables are of one step, whenever a worker is killed."""
    moments = random.Random(time.time_ns() + moment)
    rank, delay = moments.randrange(2), moments.uniform(0.0, 1.0)
    print(f"worker {rank} is killed {delay:.3f} s after the first checkpoint")
    with WorkerRunner(2, timeout_seconds=200, starter=starter) as runner:
        runner.start(__file__, tmp_path, SHARDS[-1])
        wait_until((tmp_path / "backup-000000002.npz").exists, 150)
        time.sleep(delay)
        runner.kill(rank)
        runner.wait()
    model = load_checkpoint(tmp_path, counting_model())
    steps = int(model.optimizer.iterations.numpy())
    assert steps >= 2
    expected = 1 - RATE * steps
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=RATE / 4)
    slots = [v.numpy() for v in model.optimizer.variables if len(v.shape) == 2]
    for slot in slots:
        np.testing.assert_allclose(slot, slot.flat[0], rtol=1e-6)


if __name__ == "__main__":
    train_until_killed(*sys.argv[1:])
