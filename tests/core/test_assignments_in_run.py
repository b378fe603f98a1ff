"""Assignments to mirrored variables in functions of `run`."""

import re

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from conformance.compare import largest
from tests.training.shared import logged

EAGER = ks.RunOptions(compile=False)


def each(strategy, *values):
    return ks.PerReplica([ops.convert_to_tensor(np.float32(v)) for v in values])


@pytest.mark.parametrize("options", [None, EAGER], ids=["compiled", "eager"])
def test_different_assignments_warn(options, mirrored, caplog):
    strategy = mirrored(3)
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0], name="weight")

    def step(x):
        weight.assign(weight + x)

    for _ in range(4):
        strategy.run(step, (each(strategy, 1, 2, 3),), options=options)
    (warning,) = logged(caplog)
    assert re.search(r"'weight'.*differ.*all_reduce", warning)


def test_later_differences_warn(two, caplog):
    """As calls 1, 2, 4 and 8 are checked."""
    with two.scope():
        weight = keras.Variable(1.0, name="weight")

    def step(x):
        weight.assign(weight + x)

    equal, different = each(two, 1, 1), each(two, 1, 2)
    for _ in range(5):
        two.run(step, (equal,))
    two.run(step, (different,))
    assert not caplog.messages
    for _ in range(10):
        two.run(step, (equal,))
    assert "'weight'" in "".join(caplog.messages)


def test_equal_and_aggregated_assignments_do_not_warn(two, caplog):
    with two.scope():
        steps = keras.Variable(0.0, name="steps", trainable=False)
        mean = keras.Variable(0.0, name="mean", trainable=False)
        total = keras.Variable(0.0, aggregation="sum", trainable=False)
        own = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", trainable=False
        )

    def step(x):
        steps.assign_add(1.0)
        mean.assign(ks.get_replica_context().all_reduce("mean", x))
        total.assign_add(x)
        own.assign_add(x)

    for _ in range(4):
        two.run(step, (each(two, 1, 2),))
    assert largest([steps, mean, total, own], [4, 1.5, 12, 12]) == 0
    assert not caplog.messages


@pytest.mark.parametrize("options", [None, EAGER], ids=["compiled", "eager"])
def test_variable_of_other_strategy_is_refused(options, mirrored):
    three, two = mirrored(3), mirrored(2)
    with three.scope():
        weight = keras.Variable(1.0, name="weight")

    def assign():
        weight.assign(2.0)

    with two.scope():
        optimizer = keras.optimizers.SGD()

    def apply():
        optimizer.apply([ops.ones(())], [weight])

    created = re.escape(f"'weight' was created in the scope of {three!r}")
    runs = re.escape(f"{two!r} runs")
    for step in (assign, apply):
        with pytest.raises(ValueError, match=f"{created}.*{runs}"):
            two.run(step, options=options)
    assert float(weight) == 1.0
