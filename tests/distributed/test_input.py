"""Workers that read datasets of their own in a loop of their own."""

import importlib.util

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerFailed
from tests.distributed import input_jobs, jobs


@pytest.fixture(scope="module")
def results(in_turns, tmp_path_factory):
    """Results of each of two workers."""
    folder = tmp_path_factory.mktemp("files")
    for name in range(3):
        numbers = range(10 * name, 10 * name + 5)
        (folder / f"{name}.txt").write_text("".join(f"{i}\n" for i in numbers))
    calls = {
        "own": (jobs.datasets_of_their_own, {}),
        "failing": (jobs.sources_that_fail, {}),
        "skipped": (input_jobs.skip_batches, {}),
    }
    if importlib.util.find_spec("torch"):
        calls["loaders"] = input_jobs.loaders, {}
        if importlib.util.find_spec("tensorflow"):
            calls["shared"] = jobs.inputs_of_many_kinds, {}
            calls["policies"] = input_jobs.policies, {"folder": str(folder)}
    return in_turns(**calls)[0]


@pytest.mark.full(keep_on="torch")
def test_shared_datasets_are_split(results):
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    results = results["shared"]
    expected = jobs.inputs_of_many_kinds(alone=True)
    for result in results:
        assert len(result) == len(expected)
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_per_worker_datasets(results):
    results = results["own"]
    assert [result["contexts"] for result in results] == [[[2, 0]], [[2, 1]]]
    for result in results:
        both = [1.0, 1.0, 2.0, 2.0]
        assert [step[:-1] for step in result["steps"]] == [both, both, [1.0, 1.0]]
        assert [step[-1] for step in result["steps"]] == pytest.approx([1.5, 1.5, 1.0])


def test_read_error_of_one_worker_reaches_all(results):
    first, second = results["failing"]
    assert len(first) == len(second) == 2
    for said in first:
        assert said.startswith("WorkerReadError: 'worker 1' could not read the next ")
    for said in first + second:
        assert "the disk is gone" in said


def test_run_of_different_batches_is_reported(results):
    for result in results["skipped"]:
        assert result["equal"] == [4.0, 12.0] * 2
        assert result["steps"] == 1
        assert "worker 0: [1], worker 1: [2]." in result["error"]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="native tf.data")
def test_run_of_different_native_batches_is_reported(two_workers):
    with pytest.raises(WorkerFailed, match="`strategy.run`, worker 1: `the next elem"):
        two_workers.run(input_jobs.skip_batches, native=True)


@pytest.mark.full(keep_on="jax")
def test_worker_reads_local_rows_of_loader(results):
    """29 rows by 8, whose last 5 are 3 and 2; each computes all of these on JAX."""
    pytest.importorskip("torch")
    alone = input_jobs.loaders(alone=True)["results"]
    results = results["loaders"]
    last = (5, 5) if keras.backend.backend() == "jax" else (3, 2)
    for result, rows in zip(results, last, strict=True):
        read = result["read"]
        # On TensorFlow Keras reads two batches to know what they are made of.
        before = 16 if keras.backend.backend() == "tensorflow" else 0
        assert read["fit"] == before + 2 * (3 * 4 + rows)
        # All rows of the first batch, to see whether they draw random numbers.
        assert read["evaluate"] == before + 8 + 2 * 4 + rows
        assert read["predict"] == before + 3 * 4 + rows
        assert read["noisy"] == 2 * 29 + before
        # And all rows of the first batch.
        assert read["indexed"] == before + 2 * (3 * 4 + rows) + 4
        assert read["loop"] == read["indexed loop"] == 15 - (result is results[1])
        for name, expected in alone.items():
            for got, want in zip(result["results"][name], expected, strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)


def test_auto_shard_policies(results):
    """The first worker has two of three files of 5 rows, in batches of 4."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("torch")
    first, second = results["policies"]
    for kind in ("file", "options"):
        # A global batch has the rows of both, which divide them anew in a loop.
        rows = [
            sum(map(len, pair)) for pair in zip(first[kind], second[kind], strict=True)
        ]
        assert rows == [4, 4, 3, 2, 1, 1]
        assert sorted(sum(first[kind] + second[kind], [])) == [
            *range(5),
            *range(10, 15),
            *range(20, 25),
        ]
    assert first["data"] == [[0, 1], [4, 10], [13, 14], [22, 23]][:4]
    assert first["hint"] == [[0, 2], [4, 6]] and second["hint"] == [[1, 3], [5, 7]]
    assert first["sampler"] == [[0, 2], [4, 6]]
    assert second["sampler"] == [[1, 3], [5, 0]]  # padded
    for result in (first, second):
        assert "made for the 2 workers" in result["wrong"]
        assert "keras_strategy.files(pattern)" in result["list"]
    assert (first["names"], second["names"]) == (["0.txt", "2.txt"], ["1.txt"])
