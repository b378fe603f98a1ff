"""Workers that train something else, or hold other values, are told so."""

import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs

ALIKE = {
    "beta": "optimizer.beta_1 (worker 0: 0.9; worker 1: 0.5)",
    "clipnorm": "optimizer.clipnorm (worker 0: None; worker 1: 1.0)",
    "class": "optimizer.class (worker 0: keras",
    "loss": "loss (worker 0: tests.distributed.jobs._loss_of_first; worker 1: ",
    "layer": "model.layers[0].activation (worker 0: relu; worker 1: tanh)",
    "schedule": "callbacks (worker 0: []; worker 1: ['LearningRateScheduler'])",
    "patience": "callback EarlyStopping.patience (worker 0: 2; worker 1: 3)",
    "epochs": "argument epochs (worker 0: 1; worker 1: 2)",
    "arrays": "argument x (worker 0: an array (8, 6) of float32, whose",
    "tensors": "argument x (worker 0: an array (8, 6) of float32, whose",
    "tables": "argument x (worker 0: an array (8, 6) of float32, whose",
    "words": "argument x (worker 0: an array (2, 1) of object, whose",
    "large": "argument x (worker 0: an array (60000, 6) of float32, whose",
    "weights": "argument sample_weight (worker 0: an array (8,) of float32, whose",
    "validation": "argument validation_data (worker 0: ['an array (8, 6) of",
    "epsilon": "keras.config.epsilon (worker 0: 1e-07; worker 1: 0.001)",
    "evaluate": "the same in `evaluate`. They differ in argument x",
    "predict": "the same in `predict`. They differ in argument x",
    "train_on_batch": "in `train_on_batch`. They differ in argument x",
    "test_on_batch": "in `test_on_batch`. They differ in argument x",
    "predict_on_batch": "in `predict_on_batch`. They differ in argument x",
    "rows": "argument x (worker 0: an array (4, 6) of float32, whose",
    "Keras's": "keras.config.epsilon (worker 0: 1e-07; worker 1: 0.001)",
    "vocabulary": "adapted layer 0 'string_lookup'.vocabulary (worker 0: ['[UNK]', 'b'",
    "batches": "Received different rows or values",
    "watch": "no error",
    "rate": "no error",
    "same vocabulary": "no error",
    "kinds": "no error",
    "batch": "no error",
}


@pytest.mark.full(keep_on="torch")
def test_differing_fit_arguments_are_reported(two_workers):
    pytest.importorskip("pandas")
    pytest.importorskip("tensorflow")
    for result in two_workers.run(jobs.fits_that_differ):
        assert result.keys() == ALIKE.keys()
        for case, said in result.items():
            assert ALIKE[case] in said, (case, said)


# At the end of the second epoch, or when they save before it; they ask each other once
# for each end.
DRIFTS = {
    "nothing": ("At the end of an epoch the", "2"),
    "checkpoint": ("At `save` to best.keras the", "1"),
    "backup": ("At the backup the", "1"),
}


@pytest.mark.full(keep_on="jax")
def test_diverging_weights_are_reported(two_workers, tmp_path):
    for results in two_workers.run(jobs.drifts, str(tmp_path)):
        assert results.keys() == DRIFTS.keys()
        for name, (told, epochs, asked) in results.items():
            begin, ends = DRIFTS[name]
            assert told.startswith(begin), told
            assert "The first variable that differs is" in told
            assert "kernel'" in told and "worker 0: " in told and "worker 1: " in told
            assert (epochs, asked) == ("[0, 1]", ends)


@pytest.mark.full(keep_on="torch")
def test_deadlock_is_reported(starter):
    with WorkerRunner(2, timeout_seconds=110, starter=starter) as runner:
        runner.start(jobs.chief_predicts_alone)
        ends = runner.wait()
    assert all(end.exit_status != 0 for end in ends)
    output = ends[0].output + ends[1].output
    said = "worker 0: `what the chief waits for`, worker 1: `"
    assert said in output
    assert "Their callbacks differ (worker 0: LambdaCallback; worker 1: none)" in output
