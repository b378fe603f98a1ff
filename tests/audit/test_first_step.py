"""Audit of the first step: it names what cannot be split, and that step runs whole.

A step that runs whole equals one device's. `test_whole_steps.py` has more programs.
"""

import functools
import gc
import re

import keras
import pytest
from keras import ops

import keras_strategy as ks
from keras_strategy.audit import policy
from keras_strategy.audit.policy import kinds_that_run_whole
from tests.equality import models
from tests.equality.compare import assert_equal, largest, scope, train
from tests.training.shared import alone

BACKEND = keras.backend.backend()
X, Y = models.regression(19)


class Largest(keras.metrics.Metric):
    """A maximum, in a variable that is added up."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true))))

    def result(self):
        return ops.convert_to_tensor(self.largest)


class Moving(Largest):
    """A moving mean."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(0.9 * self.largest + 0.1 * ops.mean(y_true))


class Welford(keras.metrics.Metric):
    """A mean and a variance, brought up to date batch by batch."""

    def __init__(self, name="welford"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")
        self.mean = self.add_variable((), "zeros", name="mean")
        self.m2 = self.add_variable((), "zeros", name="m2")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.cast(ops.size(y_true), "float32")
        mean = ops.mean(y_true)
        delta, count = mean - self.mean, self.count + rows
        self.m2.assign(
            self.m2
            + ops.sum(ops.square(y_true - mean))
            + ops.square(delta) * self.count * rows / count
        )
        self.mean.assign(self.mean + delta * rows / count)
        self.count.assign(count)

    def result(self):
        return self.m2 / self.count


class Sums(Welford):
    """The variance of sums over rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + ops.cast(ops.size(y_true), "float32"))
        self.mean.assign(self.mean + ops.sum(y_true))
        self.m2.assign_add(ops.sum(ops.square(y_true)))

    def result(self):
        return self.m2 / self.count - ops.square(self.mean / self.count)


def root(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def mean_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def against_the_mean(y_true, y_pred):
    """A number for each row, which depends on the others."""
    return ops.mean(ops.square(y_pred - ops.mean(y_true, axis=0)), axis=-1)


def error_of_rows(y_true, y_pred):
    return ops.mean(ops.square(y_pred - y_true), axis=-1)


class Centered(keras.Model):
    """Its call takes the mean of the batch away."""

    def __init__(self):
        super().__init__()
        self.body = models.mlp()

    def call(self, x):
        return self.body(x - self.mean(x))

    def mean(self, x):
        return ops.mean(x, axis=0)


class Centering(keras.layers.Layer):
    """A layer that takes the mean of the batch away."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class ComparedTo(keras.layers.Layer):
    """A layer that takes a row of the batch away."""

    def __init__(self, row):
        super().__init__()
        self.row = row

    def call(self, x):
        return x - x[self.row]


class Numbered(keras.layers.Layer):
    """A layer that counts the rows of the batch."""

    def call(self, x):
        return x + ops.cast(ops.arange(ops.shape(x)[0])[:, None], x.dtype)


class Halving(keras.layers.Layer):
    def call(self, x):
        return x / 2


class Mixing(keras.layers.Layer):
    """In training it mixes each row with another."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)

    def call(self, x, training=False):
        x = self.dropout(x, training=training)
        return 0.7 * x + 0.3 * ops.flip(x, axis=0) if training else x


class CenteredOfAll(Centered):
    def mean(self, x):
        replica = ks.get_replica_context()
        return super().mean(x if replica is None else replica.all_gather(x, axis=0))


class Plain(Centered):
    def call(self, x):
        return self.body(x)


class Normalized(Plain):
    """Keras's own layer compares rows; what is said of it is said elsewhere."""

    def __init__(self):
        super().__init__()
        self.normalization = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.body(self.normalization(x, training=training))


class Noisy(Plain):
    """Draws random numbers."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        return self.body(x + keras.random.normal(ops.shape(x), seed=self.seed))


class NoisyByTheEngine(Plain):
    """Draws from a generator that Keras knows nothing of."""

    def call(self, x):
        if BACKEND == "torch":
            import torch

            noise = torch.randn_like(x)
        elif BACKEND == "tensorflow":
            import tensorflow as tf

            noise = tf.random.normal(tf.shape(x))
        else:
            return super().call(x)
        return self.body(x + noise)


class Summed(Plain):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return ops.sum(ops.square(y - y_pred))


class Meant(Plain):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return ops.mean(ops.square(y - y_pred)) + 1.0


class NoisyLoss(Noisy):
    """Compares what the model gives with noise."""

    def call(self, x):
        return self.body(x)

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seed)
        return ops.mean(ops.square(y_pred - noise))


class Kept(Plain):
    """Keras's own, of a loss that is summed: it comes to one device's."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight)


class Logged(Plain):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "half": logs["loss"] / 2, "other": self.of(y_pred)}

    def of(self, y_pred):
        return ops.mean(y_pred)


class LoggedMaximum(Logged):
    def of(self, y_pred):
        return ops.max(y_pred)


SUM = keras.losses.MeanSquaredError(reduction="sum")
# What the warning names, if there is one, and what a model is made of.
CASES = {
    "a maximum": ("'largest'", {"metrics": Largest}),
    "a moving mean": ("'moving'", {"metrics": lambda: Moving("moving")}),
    "moments": ("'welford'", {"metrics": Welford}),
    "sums": (None, {"metrics": Sums}),
    "a root of a mean": ("'root'", {"metrics": lambda: root}),
    "a mean": (None, {"metrics": lambda: mean_error}),
    "a metric of rows that compares": (
        "'against_the_mean'",
        {"metrics": lambda: against_the_mean},
    ),
    "a metric of rows": (None, {"metrics": lambda: error_of_rows}),
    "a loss of rows that compares": (
        "'against_the_mean'",
        {"loss": lambda: against_the_mean},
    ),
    "a loss of rows": (None, {"loss": lambda: error_of_rows}),
    "a loss of all rows": (None, {"loss": lambda: root}),
    "a call that compares": ("Centered.call", {"model": Centered}),
    "a layer that compares": (
        "(Centering)",
        {"model": lambda: models.mlp(lambda: Centering())},
    ),
    "a layer that compares to the first row": (
        "(ComparedTo)",
        {"model": lambda: models.mlp(lambda: ComparedTo(0))},
    ),
    "a layer that compares to the last row": (
        "(ComparedTo)",
        {"model": lambda: models.mlp(lambda: ComparedTo(-1))},
    ),
    "a layer that numbers rows": (
        "(Numbered)",
        {"model": lambda: models.mlp(lambda: Numbered())},
    ),
    "a layer that compares in training": (
        "(Mixing)",
        {"model": lambda: models.mlp(lambda: Mixing())},
    ),
    "a layer that draws and compares": (
        "(Mixing)",
        {"model": lambda: models.mlp(lambda: Mixing(0.2))},
    ),
    "batch normalization": (None, {"model": Normalized}),
    "a layer": (None, {"model": lambda: models.mlp(lambda: Halving())}),
    "a call that gathers": (None, {"model": CenteredOfAll}),
    "a call": (None, {"model": Plain}),
    "a call that draws": (None, {"model": Noisy}),
    "a call that draws by itself": ("random numbers", {"model": NoisyByTheEngine}),
    "compute_loss that sums": ("Summed.compute_loss", {"model": Summed}),
    "compute_loss": (None, {"model": Meant}),
    "compute_loss that draws": (None, {"model": NoisyLoss}),
    "logs of a mean": (None, {"model": Logged}),
    "logs of a maximum": ("the log 'other'", {"model": LoggedMaximum}),
    "a loss of all rows in compute_loss": (None, {"model": Kept, "loss": lambda: root}),
    "a loss that sums in compute_loss": (None, {"model": Kept, "loss": lambda: SUM}),
}


@pytest.fixture(autouse=True)
def no_gathering_parts(monkeypatch):
    """Let all steps that differ run whole."""
    monkeypatch.setattr(policy, "MAX_GATHERING_PARTS", 0)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "one device" in r.getMessage()]


def make_case(parts):
    compiled = {"loss": parts["loss"]()} if "loss" in parts else {}
    compiled["metrics"] = [parts["metrics"]()] if "metrics" in parts else []
    return models.compiled(parts.get("model", models.mlp)(), **compiled)


@pytest.mark.full(keep=4, keep_on="torch")
@pytest.mark.parametrize("name, parts", CASES.values(), ids=CASES)
def test_first_step_warns_and_equals_one_device(name, parts, two, caplog):
    make = functools.partial(make_case, parts)
    one = alone(make, X, Y, predicted=0)
    assert not warnings_of(caplog)
    many = train(two, make, X, Y, predicted=0)
    is_named = BACKEND != "jax" and name is not None
    assert len(warnings_of(caplog)) == is_named
    assert all(name in message for message in warnings_of(caplog))
    assert kinds_that_run_whole(many.model) == ({"train"} if is_named else set())
    # Compiled, TensorFlow draws other numbers of its own than eagerly.
    if parts.get("model") not in (Noisy, NoisyByTheEngine, NoisyLoss, Normalized):
        assert_equal(one, many)


DIFFERING = "a moving mean", "a loss of rows that compares", "a layer that compares"


@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
@pytest.mark.parametrize("name", DIFFERING)
@pytest.mark.parametrize("mode", ["warn", "off"])
def test_split_step_differs(mode, name, two, caplog, audit_mode):
    place, parts = CASES[name]
    make = functools.partial(make_case, parts)
    audit_mode(mode)
    many = train(two, make, X, Y, predicted=0)
    assert len(warnings_of(caplog)) == (mode == "warn")
    assert all(place in message for message in warnings_of(caplog))
    assert not kinds_that_run_whole(many.model)
    with pytest.raises(AssertionError):
        assert_equal(alone(make, X, Y, predicted=0), many)


@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
def test_raise_mode_raises_before_the_first_step(two, caplog, audit_mode):
    place, parts = CASES["a layer that compares"]
    with two.scope():
        model = make_case(parts)
    before = model.get_weights()
    audit_mode("raise")
    with pytest.raises(RuntimeError, match=re.escape(place)):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert largest(before, model.get_weights()) == 0
    assert not warnings_of(caplog)


class Weighing(Plain):
    """Divides by the weights, or by the rows."""

    def __init__(self, by_weights):
        super().__init__()
        self.by_weights = by_weights

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        error = ops.square(y - y_pred)[:, 0]
        if sample_weight is None:  # what `evaluate` is not given
            return ops.mean(error)
        rows = ops.cast(ops.shape(y)[0], "float32")
        divided_by = ops.sum(sample_weight) if self.by_weights else rows
        return ops.sum(error * sample_weight) / divided_by


@pytest.mark.full(keep=1)
@pytest.mark.skipif(BACKEND == "jax", reason="fit has all rows")
@pytest.mark.parametrize("by_weights", [True, False])
def test_loss_using_sample_weights_equals_one_device(by_weights, two, caplog):
    def make():
        return models.compiled(Weighing(by_weights))

    weights = ops.convert_to_numpy(ops.linspace(0.1, 3.0, len(X), dtype="float32"))
    given = {"sample_weight": weights, "predicted": 0}
    one, many = (train(strategy, make, X, Y, **given) for strategy in (None, two))
    assert_equal(one, many)
    assert len(warnings_of(caplog)) == by_weights
    assert all("Weighing.compute_loss" in message for message in warnings_of(caplog))


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere a call is a trace")
def test_audit_leaves_no_state(two):
    one, many = (
        train(strategy, lambda: models.compiled(Counting()), X, Y)
        for strategy in (None, two)
    )
    assert one.model.calls == many.model.calls


def test_audit_leaves_sample_weights_unchanged(two, caplog):
    """On torch, Keras's losses write to the weights of values that have a mask."""
    x, y = models.steps(11)

    def make():
        return models.compiled(models.masked_steps())

    options = {"sample_weight": models.weights_of(y.shape[:2]), "predicted": 0}
    one = alone(make, x, y, **options)
    assert_equal(one, train(two, make, x, y, **options))
    assert not warnings_of(caplog)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="one device cannot train it")
def test_loss_of_each_row_warns(two, caplog):
    def make():
        return models.compiled(loss=keras.losses.MeanSquaredError(reduction=None))

    train(two, make, X, Y, predicted=0)
    (message,) = warnings_of(caplog)
    assert "the gradients of `Sequential.train_step`" in message


class WithAStep(Plain):
    def train_step(self, data):
        x, y = data
        loss_of = ks.value_and_grad(
            lambda: ops.mean(ops.square(self(x) - y)), self.trainable_variables
        )
        loss, gradients = loss_of()
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class MixedUp(WithAStep):
    """Calls itself with rows that its step has mixed."""

    def train_step(self, data):
        return super().train_step([part + ops.flip(part, axis=0) for part in data])


@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
def test_step_that_mixes_rows_is_named(two, caplog):
    train(two, lambda: models.compiled(MixedUp()), X, Y, epochs=1, predicted=0)
    (message,) = warnings_of(caplog)
    assert "the code of `MixedUp.train_step`" in message


class Stepping(Plain):
    """Derives as one does on its backend."""

    def __init__(
        self, loss, rate=0.0, clip=False, weighted=False, largest=False, uphill=False
    ):
        super().__init__()
        self.of_batch, self.clip, self.weighted = loss, clip, weighted
        self.largest, self.uphill = largest, uphill
        self.rows = ops.zeros((19,))  # on torch a step may write into it
        self.dropout = keras.layers.Dropout(rate, seed=5)

    def call(self, x, training=False):
        return self.body(self.dropout(x, training=training))

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        if BACKEND == "torch":
            self.rows.add_(1)

        def computed():
            given = (weight,) if self.weighted else ()
            return self.of_batch(y, self(x, training=True), *given)

        def derived():
            if BACKEND == "torch":
                self.zero_grad()
                loss = computed()
                loss.backward()
                return loss, [v.value.grad for v in variables]
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = computed()
            return loss, tape.gradient(loss, variables)

        loss, gradients = derived()
        if self.uphill:
            # The gradients of where the loss is larger.
            steps = [ops.sign(gradient) / 10 for gradient in gradients]
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_add(step)
            _, gradients = derived()
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_sub(step)
        if self.clip:
            gradients = [ops.clip(gradient, -0.01, 0.01) for gradient in gradients]
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "largest": ops.max(y)} if self.largest else {"loss": loss}


def contrast(y_true, y_pred):
    """Each row is the negative of the others."""
    alike = ops.matmul(y_pred, ops.transpose(y_true))
    return ops.mean(ops.logsumexp(alike, axis=-1) - ops.diagonal(alike))


class Calls(keras.metrics.Metric):
    """Keeps its state in Python."""

    calls = 0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.calls += 1

    def result(self):
        return ops.convert_to_tensor(float(self.calls))

    def reset_state(self):
        self.calls = 0


class Sorted(Plain):
    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return ops.sort(self(x), axis=0)


def squared(y_true, y_pred):
    return ops.sum(ops.square(y_pred - y_true))


def of_some(y_true, y_pred):
    """A mean over entries that are drawn."""
    drawn = keras.random.uniform(ops.shape(y_pred), seed=7) < 0.6
    error = ops.square(y_pred - y_true)
    some = ops.cast(drawn, error.dtype)
    return ops.sum(some * error) / (ops.sum(some) + 1e-6)


def between_thirds(y_true, y_pred):
    """Of fewer than 3 rows it is not a number."""
    error = ops.square(y_pred - y_true)
    third = ops.shape(error)[0] // 3
    return ops.mean(error[:third] * error[third : 2 * third])


def by_weights(y_true, y_pred, weight):
    values = ops.mean(ops.square(y_pred - y_true), axis=-1)
    return ops.sum(values * weight) / ops.sum(weight)


WEIGHTED = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
# True if the step runs whole, and what it is made of.
STEPS = {
    "a sum, drawn": (True, {"loss": squared, "rate": 0.3}),
    "a mean of what is drawn": (True, {"loss": of_some}),
    "a mean, drawn": (False, {"loss": mean_error, "rate": 0.3}),
    "a sum": (True, {"loss": squared}),
    "a sum of Keras's": (False, {"loss": SUM}),
    "compared, drawn": (True, {"loss": contrast, "rate": 0.3}),
    "a maximum is logged": (True, {"loss": mean_error, "largest": True}),
    "clipped by hand": (True, {"loss": mean_error, "clip": True}),
    "uphill": (True, {"loss": mean_error, "uphill": True}),
    "a third of the rows with another": (True, {"loss": between_thirds}),
    "weights of Keras's": (False, {"loss": WEIGHTED, "weighted": True}),
    "weights": (True, {"loss": by_weights, "weighted": True}),
}


@pytest.mark.full(keep_on="torch")
@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
def test_each_function_warns_once(two, caplog):
    def make():
        model = models.compiled(Sorted(), metrics=[Calls(name="calls")])
        model.run_eagerly = True
        return model

    one, many = (train(strategy, make, X, Y) for strategy in (None, two))
    metric, predictions = warnings_of(caplog)
    assert "'Calls.calls'" in metric
    assert "`Sorted.predict_step`" in predictions
    assert_equal(one, many)
    assert kinds_that_run_whole(many.model) == {"train", "predict"}


@pytest.mark.full(keep=2, keep_on="tensorflow")
@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
@pytest.mark.parametrize("warned, parts", STEPS.values(), ids=STEPS)
def test_custom_train_step_equals_one_device(warned, parts, two, caplog):
    def make():
        return models.compiled(Stepping(**parts))

    weight = {"sample_weight": models.weights_of(19)}
    one = alone(make, X, Y, predicted=0, **weight)
    many = train(two, make, X, Y, predicted=0, **weight)
    assert_equal(one, many)
    assert len(warnings_of(caplog)) == warned
    places = "`Stepping.train_step`", "the log 'largest'", "the weights of the layer"
    for message in warnings_of(caplog):
        assert any(place in message for place in places)
    if BACKEND == "torch" and "rate" not in parts:
        # Two epochs of three batches, by each replica that runs the step.
        assert float(ops.max(many.model.rows)) == (6 if warned else 12)


class WithATest(Plain):
    """Computes the numbers that it returns and gives to metrics itself."""

    def __init__(self, number, metric=None):
        super().__init__()
        self.number, self.tracked = number, metric

    def test_step(self, data):
        x, y = data
        number = self.number(y, self(x))
        if self.tracked is None:
            return {"number": number}
        self.tracked.update_state(number)
        return {"number": self.tracked.result()}


class OfScalars(keras.metrics.Metric):
    """A mean over batches, however many rows each has."""

    def __init__(self):
        super().__init__(name="of_scalars")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, value):
        self.total.assign_add(value)
        self.batches.assign_add(1)

    def result(self):
        return self.total / self.batches


def largest_of(y_true, y_pred):
    return ops.max(y_pred)


TESTS = {
    "a mean": (False, mean_error, None),
    "a maximum": (True, largest_of, None),
    "a mean of means": (False, mean_error, keras.metrics.Mean),
    "a mean of rows": (False, error_of_rows, keras.metrics.Mean),
    "a mean of sums": (True, squared, keras.metrics.Mean),
    "a sum of sums": (False, squared, keras.metrics.Sum),
    "a sum of means": (True, mean_error, keras.metrics.Sum),
    "a metric of one's own": (True, mean_error, OfScalars),
}


@pytest.mark.full(keep=2, keep_on="torch")
@pytest.mark.skipif(BACKEND == "jax", reason="a step is one program there")
@pytest.mark.parametrize("warned, number, metric", TESTS.values(), ids=TESTS)
def test_custom_test_step_equals_one_device(warned, number, metric, two, caplog):
    def evaluated(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = WithATest(number, metric and metric())
            model.compile(run_eagerly=strategy is None)
        return model.evaluate(X[:11], Y[:11], batch_size=8, return_dict=True, verbose=0)

    one = evaluated(None)
    assert not warnings_of(caplog)
    many = evaluated(two)
    assert abs(one["number"] - many["number"]) < 1e-5
    found = warnings_of(caplog)
    assert len(found) == warned
    assert not warned or "'number'" in found[0] or "'of_scalars'" in found[0]


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.skipif(BACKEND == "jax", reason="nothing is tried there")
@pytest.mark.parametrize("often", [3, 5, 10])
def test_audit_collects_no_losses(often, two):
    """What a program uses is kept as long as the program."""
    with two.scope():
        model = models.compiled(WithAStep())
    gc.collect()
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(often, 1, 1)
    try:
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    finally:
        gc.set_threshold(*before)
        # As conftest.py leaves it: the engine's objects are not looked through.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
