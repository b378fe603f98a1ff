"""Workers that read datasets of their own in a loop of their own."""

import keras
import numpy as np
import pytest

from tests.workers import jobs


def test_datasets_that_all_workers_share(two_workers):
    results = two_workers.run(jobs.inputs_of_many_kinds)
    expected = jobs.inputs_of_many_kinds(alone=True)
    for result in results:
        assert len(result) == len(expected)
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_each_worker_gives_its_own_rows(two_workers):
    results = two_workers.run(jobs.own_rows)
    if keras.backend.backend() == "tensorflow":
        for (refused,) in results:
            assert "write a loop of your own" in refused
        return
    expected = jobs.own_rows(alone=True)
    for result in results:
        assert len(result) == len(expected)
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_datasets_of_their_own(two_workers):
    results = two_workers.run(jobs.datasets_of_their_own)
    assert [result["contexts"] for result in results] == [[[2, 0]], [[2, 1]]]
    for result in results:
        both = [1.0, 1.0, 2.0, 2.0]
        assert [step[:-1] for step in result["steps"]] == [both, both, [1.0, 1.0]]
        assert [step[-1] for step in result["steps"]] == pytest.approx([1.5, 1.5, 1.0])
        assert "needs the same global batches on every worker" in result["refused"]


def test_a_worker_that_cannot_read(two_workers):
    first, second = two_workers.run(jobs.sources_that_fail)
    assert len(first) == len(second) == 2
    for said in first:
        assert said.startswith("WorkerInputError: 'worker 1' could not read the next ")
    for said in first + second:
        assert "the disk is gone" in said
