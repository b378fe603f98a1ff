"""Virtual replicas in processes: the bits of one device."""

import random
import time

import pytest

import keras_strategy as ks
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner
from tests.distributed import virtual_replica_jobs as jobs
from tests.processes import wait_until

if get_engine().virtual_replicas_unsupported_reason() is not None:
    pytest.skip("without virtual replicas", allow_module_level=True)


def on_one_device(name, **fit):
    strategy = ks.MirroredStrategy(
        ["cpu:0"],
        batch_statistics=jobs.PROGRAMS[name][2],
        virtual_replicas=jobs.VIRTUAL_REPLICAS,
    )
    return jobs.fit(name, strategy, **fit)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize(
    ("workers", "devices", "names"),
    [
        (2, 1, "text,images"),
        (2, 1, "attention,local images"),
        (3, 1, ",".join(jobs.PROGRAMS)),
        (3, 2, ",".join(jobs.PROGRAMS)),
    ],
)
def test_workers_have_bits_of_one_device(workers, devices, names, starter):
    with WorkerRunner(workers, devices, timeout_seconds=300, starter=starter) as runner:
        found = runner.run(jobs.fit_each, names.split(","))
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
        runner.start(jobs.__file__, tmp_path)
        wait_until((tmp_path / "backup-000000002.npz").exists, 150)
        time.sleep(delay)
        runner.kill(rank)
        runner.wait()
    assert list(tmp_path.glob("backup-*.npz"))
    with WorkerRunner(2, timeout_seconds=200, starter=starter) as runner:
        resumed = runner.run(jobs.fit_with_backups, str(tmp_path))
    whole = on_one_device("text", epochs=40)
    for worker in resumed:
        assert worker["fingerprint"] == whole["fingerprint"]
        assert worker["predictions"] == whole["predictions"]
