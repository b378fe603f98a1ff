"""Loops of a program's own, with `experimental.PreemptionCheckpointHandler`."""

import os
import signal

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed import preemption_jobs
from tests.equality.compare import largest

KINDS = [False, *([True] if keras.backend.backend() == "tensorflow" else [])]


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("native", KINDS, ids=["ours", "native"][: len(KINDS)])
def test_workers_save_end_and_resume_together(starter, tmp_path, native):
    """To the last bit."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(preemption_jobs.whole_and_resumed, str(tmp_path), native)
    for whole, ended, resumed in results:
        assert (whole["ran"], whole["code"]) == ([0, 1, 2, 3, 4, 5], None)
        assert (ended["ran"], ended["code"]) == ([0, 1, 2], 75)
        assert (resumed["ran"], resumed["code"]) == ([3, 4, 5], None)
        assert largest(whole["weights"], ended["weights"]) > 1e-3
        assert largest(whole["weights"], resumed["weights"]) == 0
        if not native:
            assert resumed["mean"] == whole["mean"]
            assert resumed["drawn"] == whole["drawn"]
    if native:
        return
    # One process goes on as well, where the two were interrupted.
    written = sorted(path.name for path in (tmp_path / "ended").iterdir())
    assert written == ["backup-000000001.npz"]
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    alone = preemption_jobs.train(strategy, str(tmp_path / "ended"), 98, None, False)
    assert alone["ran"] == [3, 4, 5]
    assert largest(results[0][0]["weights"], alone["weights"]) < 2e-5


def test_loop_without_run(two, tmp_path):
    """And a function of the user's that saves, with arguments of the user's."""
    with two.scope():
        total = keras.Variable(0.0, aggregation="sum")
    saved = []

    def save(*args, **kwargs):
        saved.append((args, kwargs, float(total.value)))

    config = ks.experimental.TerminationConfig(save_fn=save, exit_fn=lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    handler = ks.experimental.PreemptionCheckpointHandler(
        two.cluster_resolver, None, None, config
    )
    for number in range(4):
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        total.assign_add(1.0)
        handler.save_checkpoint_if_preempted(number, name="x")
    assert saved == [((2,), {"name": "x"}, 3.0)]
    assert handler.total_run_calls == 4
    del handler
    assert signal.getsignal(signal.SIGTERM) is before


def test_users_checkpoint_manager(two):
    class Manager:
        calls = []

        def restore_or_initialize(self):
            self.calls.append("restore")

        def save(self, *args):
            self.calls.append(("save", *args))

    handler = ks.experimental.PreemptionCheckpointHandler(None, Manager())
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        handler.run(lambda: None)
    assert Manager.calls == ["restore", ("save",)]


def test_bad_arguments_are_refused(two, tmp_path):
    make = ks.experimental.PreemptionCheckpointHandler
    with pytest.raises(ValueError, match="must be an object to save"):
        make(None, None)
    outside = keras.Variable(np.zeros(2))
    with pytest.raises(ValueError, match="in the scope of a strategy"):
        make(None, {"a": outside}, tmp_path)
    with pytest.raises(ValueError, match="Received: 'step' of type int"):
        make(None, {"step": 3}, tmp_path)
    with two.scope():
        inside = keras.Variable(np.zeros(2))
    with pytest.raises(ValueError, match="needs a folder"):
        make(None, {"a": inside})
    spec = {"chief": ["a:1"], "worker": ["b:1"]}
    resolver = ks.cluster_resolver.SimpleClusterResolver(
        ks.cluster_resolver.ClusterSpec(spec), task_type="chief", task_id=0
    )
    with pytest.raises(RuntimeError, match="Create the MultiWorkerMirroredStrategy"):
        make(resolver, {"a": inside}, tmp_path)
