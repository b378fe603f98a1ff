"""Loops of a program's own, with `experimental.PreemptionCheckpointHandler`."""

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from conformance.compare import largest
from keras_strategy.testing import WorkerRunner
from tests.distributed.jobs import digits

STEPS = 6
HANDLER = ks.experimental.PreemptionCheckpointHandler


class Rows:
    """Batches one after the other, which says how many it has given."""

    def __init__(self):
        self.given = 0
        self.x, self.y = digits(STEPS * 4)

    def next(self):
        rows = slice(self.given * 4, self.given * 4 + 4)
        self.given += 1
        return self.x[rows], self.y[rows]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def train(
    strategy: Any, folder: str, seed: int, told_at: int | None, native: bool
) -> dict:
    """Trains a few steps.

    Args:
        strategy: The scope of the model.
        folder: Of the checkpoints.
        seed: Of the first weights, and of what NumPy draws.
        told_at: The step before which the last worker is preempted.
        native: Whether TensorFlow saves.

    Returns:
        The weights, which steps were run, and the exit code.
    """
    np.random.seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                # TensorFlow does not save the state of Keras's seed generators.
                *([] if native else [keras.layers.Dropout(0.3, seed=5)]),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
    start = np.random.RandomState(seed)
    for variable in model.trainable_variables:
        variable.assign(0.3 * start.randn(*variable.shape))
    rows = Rows()
    if native:
        import tensorflow as tf

        things = tf.train.Checkpoint(model=model, optimizer=optimizer)
    else:
        things = {"model": model, "optimizer": optimizer, "mean": mean, "data": rows}
    handler = HANDLER(strategy.cluster_resolver, things, folder)
    if native:
        rows.given = handler.total_run_calls

    def step(x, y):
        def loss():
            logits = model(x, training=True)
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, logits, True)
            )

        value, grads = ks.value_and_grad(loss, model.trainable_variables)()
        n = ks.get_replica_context().num_replicas_in_sync
        optimizer.apply([g / n for g in grads], model.trainable_variables)
        mean.update_state(value)

    ran, code = [], None
    try:
        with handler.watch_preemption_scope():
            for number in range(handler.total_run_calls, STEPS):
                last = strategy.extended.local_replicas[-1]
                if number == told_at and last == strategy.num_replicas_in_sync - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                # It may save first: the batch is read after that.
                handler.run(lambda: strategy.run(step, args=rows.next()))
                np.random.rand()
                ran.append(number)
    except SystemExit as end:
        code = end.code
    del handler
    variables = [*model.variables, *optimizer.variables]
    return {
        "weights": [ops.convert_to_numpy(v) for v in variables],
        "mean": float(mean.result()),
        "drawn": np.random.rand(),
        "ran": ran,
        "code": code,
    }


def whole_and_resumed(folder: str, native: bool = False) -> list[dict]:
    """Run a loop, one that is preempted, and one that resumes from there."""
    strategy = ks.MultiWorkerMirroredStrategy()
    return [
        train(strategy, f"{folder}/whole", 1, None, native),
        train(strategy, f"{folder}/ended", 1, 3, native),
        train(strategy, f"{folder}/ended", 99, None, native),
    ]


KINDS = [False, *([True] if keras.backend.backend() == "tensorflow" else [])]


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("native", KINDS, ids=["ours", "native"][: len(KINDS)])
def test_workers_save_end_and_resume_together(starter, tmp_path, native):
    """To the last bit."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(whole_and_resumed, str(tmp_path), native)
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
    alone = train(strategy, str(tmp_path / "ended"), 98, None, False)
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
