"""Real processes of both sides of a comparison."""

import keras
import pytest

from benchmarks.__main__ import rows_below, select_rows
from benchmarks.comparisons import (
    CNN,
    COMPARISONS,
    EMBEDDING,
    MLP,
    TRANSFORMER,
    Program,
)
from benchmarks.paired_processes import ProgramProcesses, measure_row
from benchmarks.paired_timing import CPU, WALL


@pytest.fixture
def comparison():
    """The first of this backend: one device, and plain Keras."""
    backend = keras.backend.backend()
    return next(c for c in COMPARISONS if c.backend == backend)


class Peer(Program):
    is_ours = False


@pytest.mark.full
def test_row_is_measured(starter, comparison):
    row = measure_row(starter, comparison, MLP, rounds=1, seconds=0.01, starts=2)
    assert row["starts"] == 2
    assert set(row["speeds"]) == {"steps/s", "steps/CPU-s"}
    assert all(speed["ratio"] > 0 for speed in row["speeds"].values())
    assert all(seconds > 0 for seconds in row["first_step_seconds"])
    assert all(megabytes > 50 for megabytes in row["peak_mb"])


def test_rows_are_selected():
    torch = select_rows(["torch"])
    assert {comparison.backend for comparison, _ in torch} == {"torch"}
    runs = select_rows(["jax", "torch"], "run, 2 processes")
    assert runs.items() <= torch.items()
    assert {case for _, case in runs} == {MLP, CNN, TRANSFORMER, EMBEDDING}
    aimed = select_rows(["torch"], aims=True)
    assert aimed == {key: torch[key] for key in torch if key[0].aim is not None}
    assert 0 < len(aimed) < len(torch)


def test_peer_runs_without_keras_strategy(starter):
    with (
        ProgramProcesses(Peer("ours:fit"), MLP, starter=starter) as side,
        pytest.raises(RuntimeError, match="A peer must run without keras_strategy"),
    ):
        side.ready()


def test_rows_below_aims_are_listed():
    def row(case, aim, ratio):
        speeds = {unit: {"ratio": ratio} for unit in (CPU, WALL)}
        return dict(backend="jax", case=case, peer="P", aim=aim, speeds=speeds)

    rows = [row("A", 0.98, 0.97), row("B", 0.98, 0.98), row("C", None, 0.5)]
    assert rows_below(rows) == {"jax: A / P"}
