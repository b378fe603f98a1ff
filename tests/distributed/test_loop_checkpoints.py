"""`CheckpointManager`: custom loops that stop in the middle of an epoch and resume."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import largest
from keras_strategy.testing import WorkerRunner
from tests.distributed.jobs import digits

EPOCHS, BATCHES = 3, 4  # of 8 rows; the last batch has 5


def train(folder: str, seed: int = 1, stop_at: int = 0, strategy: Any = None) -> dict:
    """Train with a shuffled dataset, Dropout and random numbers of NumPy.

    Args:
        folder: Where the loop saves after every third step.
        seed: Of the initial weights, the order of rows and all random numbers.
        stop_at: The number of steps after which the loop stops, as if it was killed.
        strategy: By default one of several workers.
    """
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
    x, y = digits(29)
    rows = ks.IndexedDataset(list(zip(x, y, strict=True)), 8, shuffle=True)
    dataset = strategy.experimental_distribute_dataset(rows)

    def train_step(x, y):
        def compute_loss():
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            return ks.compute_average_loss(losses)

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(compute_loss, variables)()
        optimizer.apply(gradients, variables)
        mean.update_state(loss)

    manager = ks.CheckpointManager(
        {"model": model, "optimizer": optimizer, "mean": mean, "data": dataset}, folder
    )
    step = first = manager.restore_or_initialize()
    draws = []
    while step < EPOCHS * BATCHES:
        for batch in dataset:
            strategy.run(train_step, args=batch)
            draws.append(np.random.rand())
            step += 1
            if step % 3 == 0:
                manager.save(step)
            if step == stop_at:
                return {"steps": (first, step)}
    variables = [*model.variables, *optimizer.variables, *mean.variables]
    values = [ops.convert_to_numpy(variable) for variable in variables]
    return {"steps": (first, step), "values": values, "draws": draws}


def check_same_bits(uninterrupted, stopped, resumed):
    assert (uninterrupted["steps"], stopped["steps"]) == ((0, 12), (0, 7))
    assert resumed["steps"] == (6, 12)
    assert largest(uninterrupted["values"], resumed["values"]) == 0
    assert resumed["draws"] == uninterrupted["draws"][6:]


@pytest.mark.full(keep_on="jax")
def test_resumed_loop_ends_with_same_bits(two, tmp_path):
    saved = str(tmp_path / "stopped")
    check_same_bits(
        train(str(tmp_path / "uninterrupted"), strategy=two),
        train(saved, stop_at=7, strategy=two),
        train(saved, seed=99, strategy=two),
    )


@pytest.mark.full(keep_on="tensorflow")
def test_resumed_loop_of_workers_ends_with_same_bits(starter, tmp_path):
    def run(folder, *arguments):
        with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
            return runner.run(train, str(tmp_path / folder), *arguments)

    results = [run("uninterrupted"), run("stopped", 1, 7), run("stopped", 99)]
    for of_worker in zip(*results, strict=True):
        check_same_bits(*of_worker)


def test_checkpoint_numbers_and_old_files(two, tmp_path):
    with two.scope():
        total = keras.Variable(0.0, trainable=False)
    manager = ks.CheckpointManager({"total": total}, tmp_path / "saved", max_to_keep=1)
    assert manager.restore_or_initialize() == 0
    manager.save()
    total.assign(3.0)
    manager.save()
    assert len(list((tmp_path / "saved").iterdir())) == 1
    total.assign(0.0)
    assert (manager.restore_or_initialize(), float(total)) == (2, 3.0)
    # A preemption handler counts from there.
    handler = ks.experimental.PreemptionCheckpointHandler(None, manager)
    assert handler.total_run_calls == 2


def test_bad_arguments_of_checkpoint_manager(two, tmp_path):
    with two.scope():
        total = keras.Variable(0.0, trainable=False)
    with pytest.raises(ValueError, match="`max_to_keep` must.*Received: max_to_keep=0"):
        ks.CheckpointManager({"total": total}, tmp_path, max_to_keep=0)
    with pytest.raises(ValueError, match="Received: 'step' of type int"):
        ks.CheckpointManager({"total": total, "step": 3}, tmp_path)
