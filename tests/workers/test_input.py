"""Workers that read datasets of their own in a loop of their own."""

import pytest

from tests.workers import jobs


def test_datasets_of_their_own(two_workers):
    results = two_workers.run(jobs.datasets_of_their_own)
    assert [result["contexts"] for result in results] == [[[2, 0]], [[2, 1]]]
    for result in results:
        both = [1.0, 1.0, 2.0, 2.0]
        assert [step[:-1] for step in result["steps"]] == [both, both, [1.0, 1.0]]
        assert [step[-1] for step in result["steps"]] == pytest.approx([1.5, 1.5, 1.0])
        assert "needs the same global batches on every worker" in result["refused"]
