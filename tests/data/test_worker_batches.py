"""Rows by which workers notice that they read the same ones."""

import types
from typing import Any

import numpy as np
import pytest

from keras_strategy.data import worker_batches
from keras_strategy.data.worker_batches import _RowSample


def test_sample_of_rows_is_the_same_in_any_order():
    rows = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
    samples = []
    for order in rows, rows[::-1]:
        sample = _RowSample()
        found = [sample.add(order[i : i + 10]) for i in range(0, 40, 10)]
        assert [len(f) for f in found] == [8, 8, 0, 8]  # after 1, 2 and 4 batches
        samples.append(found[-1])
    assert samples[0] == samples[1]


def test_sample_omits_rows_that_were_read_twice():
    row, padding = np.ones((1, 5)), np.zeros((3, 5))
    sample = _RowSample()
    assert len(sample.add(np.concatenate([row, padding]))) == 1
    assert sample.add(row) == []


@pytest.mark.parametrize(("common", "warned"), [([5], False), ([5, 6], True)])
def test_several_equal_rows_are_reported(common, warned, caplog, monkeypatch):
    monkeypatch.setattr(worker_batches, "_warned", set())
    cluster: Any = types.SimpleNamespace(size=2, is_chief=True)
    worker_batches._warn_if_same_rows(cluster, [[1, *common], [2, *common]])
    assert bool(caplog.messages) == warned
