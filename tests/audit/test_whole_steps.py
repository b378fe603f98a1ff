"""Steps that cannot be split by rows: they run whole and equal one device's."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from conformance import models
from conformance.compare import assert_equal, largest, scope, train
from keras_strategy.audit import policy
from keras_strategy.audit.policy import kinds_that_run_whole
from tests.audit.whole_programs import (
    PROGRAMS,
    Centering,
    X,
    Y,
    compare_rows,
    with_layer,
)
from tests.training.shared import alone, logged

BACKEND = keras.backend.backend()


@pytest.fixture(autouse=True)
def gathering_parts(request, monkeypatch):
    """Number of parts of a model that may gather rows: 0 unless a test sets it."""
    monkeypatch.setattr(policy, "MAX_GATHERING_PARTS", getattr(request, "param", 0))


def audit_warnings(caplog):
    return [message for message in logged(caplog) if "results are exact" in message]


def check(name, strategy, virtual=False):
    """Assert that a program equals one device's, and that its steps run whole."""
    program = PROGRAMS[name]
    if BACKEND == "jax" and not program.is_traceable:
        pytest.skip("one program, which is traced once")
    one_device = alone if program.is_eager else functools.partial(train, None)
    one = one_device(program.make, **program.arguments)
    many = train(strategy, program.make, **program.arguments)
    assert_equal(one, many)
    kinds = set(program.kinds.split()) if virtual else program.whole_kinds
    assert kinds_that_run_whole(many.model) == kinds
    return kinds


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_one_device(name, replicas, mirrored, caplog):
    kinds = check(name, mirrored(replicas))
    assert len(audit_warnings(caplog)) == len(kinds)


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
@pytest.mark.parametrize("gathering_parts", [4], indirect=True)
@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.gathers])
def test_gathering_part_equals_one_device(name, mirrored, caplog):
    program = PROGRAMS[name]
    one = alone(program.make, **program.arguments)
    many = train(mirrored(3), program.make, **program.arguments)
    assert_equal(one, many)
    assert not kinds_that_run_whole(many.model)
    (message,) = audit_warnings(caplog)
    assert "computes on the rows of all replicas" in message


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
@pytest.mark.parametrize("gathering_parts", [4], indirect=True)
def test_two_parts_gather_rows(mirrored, caplog):
    def make():
        hidden = [layers.Dense(3, "tanh", use_bias=False) for _ in range(2)]
        parts = [keras.Input((4,)), hidden[0], Centering(), hidden[1], Centering()]
        return models.compiled(keras.Sequential([*parts, layers.Dense(1)]))

    one, many = (train(s, make, X, Y) for s in (None, mirrored(3)))
    assert_equal(one, many)
    assert not kinds_that_run_whole(many.model)
    (message,) = audit_warnings(caplog)
    assert message.count("(Centering)") == 3


class CenteredModel(keras.Model):
    """Compares rows in its own `call`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        return y - 0.5 * keras.ops.mean(y, axis=0, keepdims=True)


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
@pytest.mark.parametrize("gathering_parts", [4], indirect=True)
def test_model_that_would_gather_all_runs_whole(mirrored):
    make = lambda: models.compiled(CenteredModel())  # noqa: E731
    one, many = (train(s, make, X, Y, predicted=0) for s in (None, mirrored(3)))
    assert_equal(one, many)
    assert kinds_that_run_whole(many.model) == {"train"}


def test_batch_of_one_row_per_replica(replicas, mirrored):
    make = with_layer(Centering)
    options = {"batch_size": replicas, "epochs": 1, "predicted": replicas}
    x, y = X[: 2 * replicas + 1], Y[: 2 * replicas + 1]
    assert_equal(
        alone(make, x, y, **options), train(mirrored(replicas), make, x, y, **options)
    )


def test_evaluate_and_predict_without_training(mirrored, caplog):
    found = []
    for strategy in (None, mirrored(3)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = models.compiled(models.mlp(Centering), metrics=["mae"])
        evaluated = model.evaluate(X, Y, batch_size=8, verbose=0)
        found.append([*evaluated, model.predict(X, batch_size=8, verbose=0)])
    assert largest(*found) < 1e-5
    expected = set() if BACKEND == "jax" else {"test", "predict"}
    assert kinds_that_run_whole(model) == expected
    assert len(audit_warnings(caplog)) == len(expected)


def test_validation_in_fit_equals_one_device(mirrored):
    make, options = with_layer(Centering), {"predicted": 0}
    options["validation_data"] = X[:11] + 1, Y[:11]
    one, many = (train(s, make, X, Y, **options) for s in (None, mirrored(3)))
    assert_equal(one, many)
    expected = set() if BACKEND == "jax" else {"train", "test"}
    assert kinds_that_run_whole(many.model) == expected


@pytest.mark.skipif(BACKEND == "tensorflow", reason="not available there")
@pytest.mark.parametrize("name", ["group deviation", "halves"])
def test_virtual_replicas_equal_one_device(name):
    devices = ["cpu:0", "cpu:1"]
    check(name, ks.MirroredStrategy(devices, virtual_replicas=4), virtual=True)


@pytest.mark.parametrize("name", ["halves", "unused layer"])
def test_sharded_optimizer_equals_one_device(name):
    check(name, ks.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer"))


def test_central_storage_equals_one_device():
    central = ks.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    check("centers", central)


def test_compile_decides_again(mirrored):
    found = []
    for strategy in (None, mirrored(3)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = models.mlp()
        for loss in (compare_rows, "mse", compare_rows):
            models.compiled(model, keras.optimizers.SGD(0.1), loss)
            model.fit(X, Y, batch_size=8, verbose=0)
            is_whole = strategy is not None and BACKEND != "jax" and loss != "mse"
            assert kinds_that_run_whole(model) == ({"train"} if is_whole else set())
        found.append(model.get_weights())
    assert largest(*found) < 2e-5


def test_ordinary_model_is_split(mirrored, caplog):
    def make():
        middle = lambda: layers.Dropout(0.3, seed=1), lambda: layers.Dense(4, "gelu")
        return models.compiled(models.mlp(*middle), metrics=["mae"])

    one, many = (train(s, make, X, Y) for s in (None, mirrored(3)))
    assert_equal(one, many)
    assert not kinds_that_run_whole(many.model) and not audit_warnings(caplog)


def test_error_of_one_device_is_raised(two):
    def fail(y_true, y_pred):
        raise KeyError("no such label")

    for strategy in (None, two):
        with scope(strategy):
            model = models.compiled(loss=fail)
        with pytest.raises(KeyError, match="no such label"):
            model.fit(X, Y, batch_size=8, verbose=0)


class Switching(layers.Layer):
    """Subtracts the mean over rows after a callback has switched it on."""

    is_on = False

    def call(self, x):
        return x - keras.ops.mean(x, axis=0) if self.is_on else x


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
@pytest.mark.parametrize("epoch", [0, 1])  # before the second and the third one
def test_setting_changed_by_callback_is_audited(epoch, mirrored):
    def switch_on(number, logs):
        model.layers[1].is_on = number >= epoch

    found = []
    for strategy in (None, mirrored(3)):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = models.compiled(models.mlp(Switching), run_eagerly=True)
        callback = keras.callbacks.LambdaCallback(on_epoch_end=switch_on)
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[callback])
        found.append(model.get_weights())
    assert largest(*found) < 2e-5
    assert kinds_that_run_whole(model) == {"train"}


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
def test_audits_become_rare_over_calls_of_fit(mirrored, monkeypatch):
    audits, epochs = [], []
    audit = policy.audit_batch
    monkeypatch.setattr(
        policy, "audit_batch", lambda *args: audits.append(len(epochs)) or audit(*args)
    )
    with mirrored(3).scope():
        model = models.compiled(models.mlp(Switching))
    for number in range(1, 6):
        epochs.append(number)
        model.fit(X, Y, batch_size=8, verbose=0)
    assert audits == [1, 2, 4]


class Interruption(keras.callbacks.Callback):
    """Ends training in the middle of the second epoch."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 5:
            raise InterruptedError


@pytest.mark.skipif(BACKEND == "jax", reason="`fit` is one program")
def test_resume_keeps_decision(mirrored, tmp_path, audit_mode):
    def fit(strategy, *callbacks):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = PROGRAMS["centers"].make()
        options = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
        model.fit(X, Y, **options, callbacks=list(callbacks))
        return model

    strategy = mirrored(3)
    backup = functools.partial(ks.callbacks.BackupAndRestore, str(tmp_path), 1)
    with pytest.raises(InterruptedError):
        fit(strategy, backup(), Interruption())
    audit_mode("off")  # so the backup alone has the decision
    resumed = fit(strategy, backup())
    assert kinds_that_run_whole(resumed) == {"train"}
    assert largest(fit(None).get_weights(), resumed.get_weights()) < 2e-5


class MaskedMean(keras.Sequential):
    """Divides the loss by the entries of the batch that are no padding."""

    masks_by_inputs = False

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, True)
        weight = sample_weight
        if weight is None:
            masked = x if self.masks_by_inputs else y
            weight = keras.ops.cast(masked != 0, "float32")
        return keras.ops.sum(loss * weight) / keras.ops.sum(weight)


@pytest.mark.parametrize("masked", ["inputs", "targets", "weights"])
def test_mask_without_padding_in_first_batch(masked, two, caplog):
    def make():
        parts = keras.Input((6,), dtype="int32"), layers.Embedding(9, 4)
        model = MaskedMean([*parts, layers.Dense(9)])
        model.masks_by_inputs = masked == "inputs"
        return models.compiled(model)

    x = np.random.RandomState(0).randint(1, 9, (20, 6))
    mask = np.arange(6) < 1 + np.arange(20)[:, np.newaxis] % 6
    mask[:8] = True
    has_weight = masked == "weights"
    weight: Any = {"sample_weight": mask.astype("float32")} if has_weight else {}
    y = (x * mask if masked == "targets" else x).astype("float32")
    x = x * mask if masked == "inputs" else x
    one = train(None, make, x, y, shuffle=False, **weight)
    assert_equal(one, train(two, make, x, y, shuffle=False, **weight))
    (warning,) = audit_warnings(caplog) or ["padding"] * (BACKEND == "jax")
    assert "padding" in warning


@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program")
def test_step_that_fails_on_padding_is_split(two, caplog):
    def root_error(y, y_pred):
        roots = keras.ops.cholesky(y[:, :, np.newaxis])[..., 0]  # fails on zeros
        return keras.ops.mean(keras.ops.square(roots - y_pred), axis=-1)

    def make():
        parts = keras.Input((3,)), layers.Dense(1)
        return models.compiled(keras.Sequential(parts), loss=root_error)

    x = np.random.RandomState(0).rand(20, 3).astype("float32") + 1
    one = train(None, make, x, x[:, :1], shuffle=False)
    assert_equal(one, train(two, make, x, x[:, :1], shuffle=False))
    assert not audit_warnings(caplog)
