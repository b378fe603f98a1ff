"""State that a layer or a metric of a user's own assigns while a model trains."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.equality import models
from tests.equality.compare import assert_equal, scope, train
from tests.training.shared import alone

BACKEND = keras.backend.backend()
# By batches of 8 the last one has a row for the first replica alone.
X, Y = models.regression(17)
REFUSES = pytest.mark.skipif(
    BACKEND == "jax", reason="fit on JAX is one program, whose state is one device's"
)


class Assigning(layers.Layer):
    """Assigns a variable in training.

    Args:
        new: Gives a new value of the variable's and the inputs, or an increment.
        how: "assign" or "assign_add".
        **weight: Arguments of `add_weight`.
    """

    def __init__(self, new, how="assign", **weight):
        super().__init__()
        self.new, self.how = new, how
        weight = {"shape": (), "initializer": "zeros", "trainable": False, **weight}
        self.state = self.add_weight(name="state", **weight)

    def call(self, x, training=False):
        if training:
            getattr(self.state, self.how)(self.new(self.state, x))
        return x


def model_of(*made):
    return models.compiled(models.mlp(*made))


def total(x):
    return ops.sum(ops.abs(x))


# What one device comes to, on any number of replicas.
EXACT = {
    "a sum that is added": lambda: Assigning(
        lambda _, x: total(x), "assign_add", aggregation="sum"
    ),
    "a sum that is subtracted": lambda: Assigning(
        lambda _, x: total(x), "assign_sub", aggregation="sum"
    ),
    "a sum that is assigned": lambda: Assigning(
        lambda _, x: total(x), aggregation="sum"
    ),
    "a count of rows": lambda: Assigning(
        lambda _, x: ops.sum(ops.ones_like(x[:, 0], dtype="int32")),
        "assign_add",
        dtype="int32",
        aggregation="sum",
    ),
    "a moving mean": lambda: Assigning(
        lambda v, x: 0.9 * v + 0.1 * ops.mean(x, axis=0),
        shape=(8,),
        aggregation="mean",
    ),
    "a mean that is added": lambda: Assigning(
        lambda _, x: ops.mean(x, axis=0), "assign_add", shape=(8,), aggregation="mean"
    ),
    "the first row": lambda: Assigning(
        lambda _, x: x[0], shape=(8,), aggregation="only_first_replica"
    ),
    "whether there was a batch": lambda: Assigning(
        lambda _, x: x[0, 0] < 100.0, dtype="bool", aggregation="only_first_replica"
    ),
    "a count of steps": lambda: Assigning(lambda v, x: 1, "assign_add", dtype="int32"),
    "a count of steps in bytes": lambda: Assigning(lambda v, x: v + 1, dtype="uint8"),
    "a flag": lambda: Assigning(lambda v, x: True, dtype="bool"),
    "what may train": lambda: Assigning(
        lambda v, x: 0.5 * v + 1.0, shape=(300,), trainable=True
    ),
}


@pytest.mark.full(keep_on="tensorflow")
def test_state_equals_one_device(mirrored):
    def make():
        return model_of(*EXACT.values())

    one = alone(make, X, Y, predicted=0)
    many = train(mirrored(3), make, X, Y, predicted=0)
    assert_equal(one, many)
    states = [
        layer.state for layer in many.model.layers if isinstance(layer, Assigning)
    ]
    found = dict(zip(EXACT, (np.array(s.numpy()) for s in states), strict=True))
    assert found["a count of rows"] == 34
    assert found["a count of steps"] == found["a count of steps in bytes"] == 6
    assert found["a flag"] and found["whether there was a batch"]


@pytest.mark.full(keep_on="jax")
def test_nan_equals_nan(two):
    model = fit_of(two, lambda: model_of(lambda: Assigning(lambda v, x: v / 0.0 * 0.0)))
    assert np.isnan(model.layers[1].state.numpy())


# Where nobody wrote an aggregation.
DIFFERENT = {
    "a sum": lambda: Assigning(lambda _, x: total(x), "assign_add"),
    "a maximum": lambda: Assigning(lambda v, x: ops.maximum(v, ops.max(x))),
    "a count of positive numbers": lambda: Assigning(
        lambda v, x: ops.sum(ops.cast(x > 0, "int32")), "assign_add", dtype="int32"
    ),
    "one entry of many": lambda: Assigning(
        lambda v, x: ops.where(ops.arange(1000) == 7, ops.max(x), 1.0), shape=(1000,)
    ),
    "whether a number is positive": lambda: Assigning(
        lambda v, x: x[0, 0] > 0, dtype="bool"
    ),
    "what may train": lambda: Assigning(
        lambda v, x: ops.mean(x, axis=0), shape=(8,), trainable=True
    ),
}


def fit_of(strategy, make, x=X, **options):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = make()
    model.fit(x, Y[: len(x)], batch_size=8, verbose=0, **options)
    return model


@pytest.mark.full(keep=2)
@REFUSES
@pytest.mark.parametrize("name", DIFFERENT)
def test_differing_state_of_split_step_is_refused(name, two, audit_mode):
    audit_mode("warn")
    with pytest.raises(ValueError, match="assigning.*/state") as caught:
        fit_of(two, lambda: model_of(DIFFERENT[name]))
    message = str(caught.value)
    for spelling in ("sum", "mean", "only_first_replica"):
        assert f'aggregation="{spelling}"' in message


@REFUSES
def test_sum_variable_read_and_assigned(two, audit_mode):
    """Replicas would count what was there once for each of them."""
    audit_mode("warn")
    with pytest.raises(ValueError, match="assign_add"):
        fit_of(
            two,
            lambda: model_of(
                lambda: Assigning(lambda v, x: v + total(x), aggregation="sum")
            ),
        )


# Without the one whose values the first rows may leave equal on all replicas: a later
# step then raises the error.
@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", [n for n in DIFFERENT if "whether" not in n])
def test_state_without_aggregation_equals_one_device(name, two):
    def make():
        return model_of(DIFFERENT[name])

    assert_equal(alone(make, X, Y, predicted=0), train(two, make, X, Y, predicted=0))


def test_run_aggregates_as_native(two):
    """Recorded with MirroredStrategy: sums of what is assigned, on the spot."""
    with two.scope():
        made = {
            aggregation: keras.Variable(10.0, trainable=False, aggregation=aggregation)
            for aggregation in ("sum", "mean", "only_first_replica")
        }

    def values(context):
        return np.float32(1 + 2 * context.replica_id_in_sync_group)

    def assign(x):
        for variable in made.values():
            variable.assign(x)

    def add(x):
        for variable in made.values():
            variable.assign_add(x)

    given = two.experimental_distribute_values_from_function(values)
    two.run(assign, args=(given,))
    assert [float(v) for v in made.values()] == [4.0, 2.0, 1.0]
    two.run(add, args=(given,))
    assert [float(v) for v in made.values()] == [8.0, 4.0, 2.0]


@pytest.mark.full(keep_on="tensorflow")
def test_keras_state_is_averaged(two):
    """None of it is refused, and what is computed from weights is one device's."""

    def make():
        return models.compiled(
            keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.SpectralNormalization(layers.Dense(8, use_bias=False)),
                    layers.BatchNormalization(**models.RENORM),
                    layers.GaussianNoise(1e-9, seed=2),
                    layers.Dense(1),
                ]
            ),
            keras.optimizers.SGD(0.0),
        )

    one = alone(make, X, Y, epochs=1)
    many = train(two, make, X, Y, epochs=1)
    assert many.apart == 0.0
    seeds = [v for v in many.model.non_trainable_variables if "seed" in v.path]
    assert seeds
    wanted = [v.numpy() for v in one.model.variables if "spectral" in v.path]
    found = [v.numpy() for v in many.model.variables if "spectral" in v.path]
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
