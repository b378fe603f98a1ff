"""Number of questions that workers send to the chief, each a round trip."""

import os
import pathlib
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed.jobs import agreements, classifier, digits
from tests.processes import wait_until


def rounds() -> dict:
    """Return the questions that workers send to make models and to run functions."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    result: dict[str, Any] = {}
    keras.utils.set_random_seed(17)
    with agreements(strategy) as result["the same values"], strategy.scope():
        classifier()
    keras.utils.set_random_seed(17 + rank)
    with agreements(strategy) as result["other values"], strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    result["weights"] = [keras.ops.convert_to_numpy(v) for v in model.variables]
    with strategy.scope():
        first = keras.Variable(np.float32(5 + rank))
        if rank == 1:
            # What one worker reads, or computes from it, is the chief's already.
            result["read"] = float(first) + 0.0
        second = keras.Variable(np.float32(7 + rank))
        first.assign_add(1)
    result["variables"] = [float(first), float(second)]

    def step(x, y):
        def loss_fn(x, y):
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model(x), from_logits=True
                )
            )

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)(x, y)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    # Of 7 rows, the first of two workers has 4, as of 8.
    batches = [digits(8), digits(8), digits(8), digits(7), digits(8)]
    result["steps"], losses = [], []
    for x, y in strategy.experimental_distribute_dataset(batches):
        with agreements(strategy) as asked:
            loss = strategy.run(step, args=(x, y))
            losses.append(float(strategy.reduce("mean", loss)))
        result["steps"].append(asked)
    result["losses"] = losses
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.train_on_batch(*batches[0])
    with agreements(strategy) as result["a batch"]:
        model.train_on_batch(*batches[1])
    result["told"] = [batches_told(strategy, takes) for takes in (None, False, True)]
    result["read by one"] = losses_of_batches(strategy, reads=rank == 1)
    return result


def batches_told(strategy: Any, batches: bool | None) -> tuple[int, int]:
    """Count the reported batches of `fit` of 3 batches, and its questions to stop.

    Args:
        strategy: The scope of the model.
        batches: True if the callback takes batches, False if epochs; None without.
    """
    with strategy.scope():
        model = classifier()
    told: list[int] = []
    when = "on_train_batch_end" if batches else "on_epoch_end"
    own = keras.callbacks.LambdaCallback(**{when: lambda number, logs: dict(logs)})
    original = keras.callbacks.CallbackList.on_train_batch_end

    def counted(self, batch, logs=None):
        told.append(batch)
        original(self, batch, logs)

    keras.callbacks.CallbackList.on_train_batch_end = counted
    try:
        with agreements(strategy) as asked:
            callbacks = [] if batches is None else [own]
            x, y = digits(24)
            model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    finally:
        keras.callbacks.CallbackList.on_train_batch_end = original
    return len(told), asked.count("whether to stop")


def losses_of_batches(strategy: Any, reads: bool) -> tuple[list[float], int]:
    """Return what a callback for batches reads in 2 epochs, and how often workers ask.

    Args:
        strategy: The scope of the model.
        reads: True if this worker has the callback.
    """
    with strategy.scope():
        model = classifier()
    losses: list[float] = []
    reader = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    callbacks = [reader] if reads else []
    with agreements(strategy) as asked:
        x, y = digits(24)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    return losses, asked.count("whether the logs of batches are read")


def different_programs(folder: str) -> None:
    """Two workers go different ways after a step that both know.

    They have little time for each other, and take none of it to start.
    """
    make = ks.MultiWorkerMirroredStrategy  # it has imported what it needs
    pathlib.Path(folder, str(os.getpid())).touch()
    wait_until(lambda: len(os.listdir(folder)) == 2, seconds=240)
    strategy = make()
    rank = strategy.extended.local_replicas.start

    def step():
        return ks.get_replica_context().all_reduce("sum", keras.ops.ones(()))

    for _ in range(2):
        total = strategy.run(step)
    if rank == 0:
        total = strategy.run(step)
        print(float(strategy.experimental_local_results(total)[0]))
    else:
        strategy.gather(strategy.run(lambda: keras.ops.ones((1,))), axis=0)


BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def results(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        return runner.run(rounds)


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("Layer._track_variables", backend="torch")
def test_scope_compares_variables_once(results):
    for result in results:
        # On TensorFlow a variable gets the chief's value when it is made.
        native = BACKEND == "tensorflow"
        assert len(result["the same values"]) == (0 if native else 1)
        # Once more to compare the shapes, before the chief's values travel.
        assert len(result["other values"]) == (0 if native else 2)
        assert result["variables"] == [6, 7]
        for own, chiefs in zip(result["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, chiefs)
        assert result["losses"] == results[0]["losses"]
    assert results[1]["read"] == 5


def test_known_function_needs_no_comparison(results):
    for result in results:
        first, *again, other, last = result["steps"]
        assert again == [[], []]
        assert last == []
        if BACKEND != "jax":
            assert first == other == []
            continue
        # A program is agreed on before it is compiled. Batches that no one program
        # serves are known to be so by all workers.
        assert first == ["strategy.run"]
        assert "strategy.run" not in other


def test_batch_signature_is_compared_once(results):
    for result in results:
        assert result["a batch"] == ["the start of train_on_batch"]


def test_stopping_together_reads_no_batch_logs(results):
    for result in results:
        alone, with_epochs, with_batches = result["told"]
        assert alone == (0, 0)
        # Callbacks of the user's own may stop after a batch. No batch waits for it.
        assert with_epochs == (0, 0)
        assert with_batches == (3, 0)


def test_one_worker_reads_batch_logs(results):
    exchanges = 1 if BACKEND == "torch" else 0
    assert results[0]["read by one"] == ([], exchanges)
    losses, exchanged = results[1]["read by one"]
    assert exchanged == exchanges
    assert len(losses) == 6 and np.all(np.isfinite(losses))


@pytest.mark.full(keep_on="tensorflow")
def test_diverging_workers_are_reported(starter, tmp_path):
    environment = {"KERAS_STRATEGY_TIMEOUT_SECONDS": "15"}
    with WorkerRunner(
        2, timeout_seconds=280, environment=environment, starter=starter
    ) as runner:
        runner.start(different_programs, str(tmp_path))
        ends = runner.wait()
    for end in ends:
        assert end.exit_status != 0
    said = "All workers must make the same calls in the same order."
    assert any(said in end.output for end in ends)
    if BACKEND == "jax":
        assert "worker 0: `strategy.run(step)`" in ends[0].output + ends[1].output
