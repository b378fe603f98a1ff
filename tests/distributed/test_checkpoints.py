"""Checkpoints of several workers, each of which writes its shards."""

import pathlib
import random
import shutil
import time

import numpy as np
import pytest

from keras_strategy.callbacks import load_checkpoint
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner
from tests.distributed import checkpoint_jobs as jobs
from tests.processes import wait_until

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
        first, second = runner.run(jobs.write, str(folder), SHARDS[-1])
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
    whole = jobs.load(str(folder), None, mirrored(1))
    assert_equal(variables, whole["loaded"])
    found = [jobs.load(str(folder), None, mirrored(3))]
    for workers, shard in (2, SHARDS[0]), (3, SHARDS[-1]):
        with WorkerRunner(workers, timeout_seconds=300, starter=starter) as runner:
            found += runner.run(jobs.load, str(folder), shard)
    for each in found:
        assert_equal(variables, each["loaded"])
        assert_equal(whole["trained"], each["trained"], 2e-5)


@pytest.mark.full(keep_on="torch")
def test_checkpoint_without_shards_loads_on_workers(starter, mirrored, tmp_path):
    """The folder may be the chief's alone."""
    variables = jobs.write(str(tmp_path), None, strategy=mirrored(2))
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for each in runner.run(jobs.load, str(tmp_path), SHARDS[-1]):
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
        found = runner.run(jobs.load, str(folder), SHARDS[-1])
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
            jobs.write_apart, str(tmp_path), SHARDS[-1], asynchronous=asynchronous
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
        runner.start(jobs.__file__, tmp_path, SHARDS[-1])
        wait_until((tmp_path / "backup-000000002.npz").exists, 150)
        time.sleep(delay)
        runner.kill(rank)
        runner.wait()
    model = load_checkpoint(tmp_path, jobs.counting_model())
    steps = int(model.optimizer.iterations.numpy())
    assert steps >= 2
    expected = 1 - jobs.RATE * steps
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=jobs.RATE / 4)
    slots = [v.numpy() for v in model.optimizer.variables if len(v.shape) == 2]
    for slot in slots:
        np.testing.assert_allclose(slot, slot.flat[0], rtol=1e-6)
