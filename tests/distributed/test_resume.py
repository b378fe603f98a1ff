"""Workers that go on where a training was interrupted, as many or others."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import resume_jobs
from tests.equality.compare import largest


@pytest.fixture(scope="module")
def of_two(starter, tmp_path_factory):
    """What two workers end with, and the folder of a backup that they left."""
    folder = tmp_path_factory.mktemp("two")
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(resume_jobs.whole_and_resumed, str(folder))
    return results, folder / "left"


@pytest.mark.full(keep_on="jax")
def test_resume_with_equal_number_of_workers(of_two):
    """To the last bit."""
    results, _ = of_two
    for whole, resumed in results:
        assert (whole["steps"], resumed["steps"]) == (12, 6)
        assert largest(whole["weights"], resumed["weights"]) == 0
        for name, told in resumed["logs"].items():
            assert told == whole["logs"][name][1:], name


@pytest.mark.full(keep_on="torch")
def test_resume_after_preemption(starter, tmp_path):
    """All end after the same batch, though one was asked to."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        ends = runner.run(resume_jobs.preempted, str(tmp_path))
    assert ends == [(75, 2), (75, 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["backup-000000001.npz"]


def same(whole: dict, resumed: dict) -> None:
    assert resumed["steps"] == 6
    assert largest(whole["weights"], resumed["weights"]) < 2e-5
    for name, told in resumed["logs"].items():
        np.testing.assert_allclose(told, whole["logs"][name][1:], atol=1e-5)


@pytest.mark.full(keep=1, keep_on="tensorflow")
def test_resume_with_another_number_of_workers(of_two, starter, mirrored, tmp_path):
    """From two to three and to one, and from one to two."""
    results, left = of_two
    whole = results[0][0]
    for name in ("three", "one"):
        shutil.copytree(left, tmp_path / name)
    one = mirrored(1)
    same(whole, resume_jobs.train(str(tmp_path / "one"), seed=98, strategy=one))
    from_one = tmp_path / "from one"
    assert resume_jobs.train(str(from_one), killed=True, strategy=one) is None
    for count, folder in ((3, tmp_path / "three"), (2, from_one)):
        with WorkerRunner(count, timeout_seconds=300, starter=starter) as runner:
            for resumed in runner.run(resume_jobs.train, str(folder), seed=99):
                same(whole, resumed)
        assert not pathlib.Path(folder).exists()


@pytest.mark.full
def test_resume_on_another_backend(tmp_path):
    """Of two replicas on this one, and of three on the next."""
    this = keras.backend.backend()
    others = {"jax": "torch", "torch": "tensorflow", "tensorflow": "jax"}
    environment = {
        **os.environ,
        "KERAS_BACKEND": others[this],
        "KERAS_STRATEGY_LOGICAL_CPUS": "3",
    }
    whole = resume_jobs.train_anywhere(str(tmp_path / "whole"))
    folder, result = tmp_path / "backup", tmp_path / "result.npz"
    assert resume_jobs.train_anywhere(str(folder), killed=True) is None
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.resume_jobs", folder, result],
        env=environment,
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    with np.load(result) as file:
        logs = json.loads(str(file["logs"]))
        weights = [file[f"arr_{i}"] for i in range(len(file.files) - 1)]
    assert largest(whole["weights"], weights) < 2e-5
    for name, told in logs.items():
        np.testing.assert_allclose(told, whole["logs"][name][1:], atol=1e-5)
