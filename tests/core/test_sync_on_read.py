"""What becomes of an on_read variable that is assigned outside of the replicas."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import number, results

VALUES = [("float32", 5.0), ("int32", 5), ("int32", -5)]


def plainly(strategy, variable, value):
    variable.assign(value)


def in_scope(strategy, variable, value):
    with strategy.scope():
        variable.assign(value)


def _merging(compiled):
    def assign(strategy, variable, value):
        def merge(strategy):
            variable.assign(value)

        def fn():
            ks.get_replica_context().merge_call(merge)

        options = ks.RunOptions(compile=None if compiled else False)
        strategy.run(fn, options=options)

    return assign


ASSIGN = {
    "plainly": plainly,
    "in scope": in_scope,
    "in merge_call": _merging(compiled=True),
    "in merge_call, not compiled": _merging(compiled=False),
}


def on_read(strategy, aggregation, dtype):
    with strategy.scope():
        return keras.Variable(
            np.zeros((), dtype),
            dtype=dtype,
            trainable=False,
            aggregation=aggregation,
            synchronization="on_read",
        )


def read(variable):
    return number(keras.ops.convert_to_tensor(variable))


@pytest.mark.needs_patch(
    "Variable._direct_assign", backend="tensorflow", case="plainly-int32-5-2"
)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("dtype", "value"), VALUES)
@pytest.mark.parametrize("how", ASSIGN)
def test_assigned_sum_is_divided_by_replicas(how, dtype, value, replicas, mirrored):
    strategy = mirrored(replicas)
    v = on_read(strategy, "sum", dtype)
    ASSIGN[how](strategy, v, value)
    assert read(v) == pytest.approx(value)
    parts = results(strategy, v)
    if dtype == "float32":
        assert parts == pytest.approx([value / replicas] * replicas)
    else:
        # Whole numbers need not divide: the first replica holds what is left.
        share = value // replicas
        assert parts == [value - share * (replicas - 1)] + [share] * (replicas - 1)


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
@pytest.mark.parametrize("how", ASSIGN)
def test_assigned_mean_is_copied_to_replicas(how, aggregation, mirrored):
    strategy = mirrored(2)
    v = on_read(strategy, aggregation, "float32")
    ASSIGN[how](strategy, v, 5.0)
    assert read(v) == 5.0
    assert results(strategy, v) == [5.0, 5.0]


def test_cross_replica_addition_to_sum(two):
    v = on_read(two, "sum", "float32")
    v.assign(2.0)
    v.assign_add(5.0)
    with two.scope():
        v.assign_sub(1.0)
    assert read(v) == 6.0 and results(two, v) == [3.0, 3.0]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_and_updates_assign_local_value(replicas, dtype, mirrored):
    strategy = mirrored(replicas)
    v = on_read(strategy, "sum", dtype)

    def assign():
        v.assign(5)

    strategy.run(assign)
    assert results(strategy, v) == [5] * replicas
    assert read(v) == 5 * replicas
    strategy.extended.update(v, lambda component: component.assign(4))
    assert results(strategy, v) == [4] * replicas
    assert read(v) == 4 * replicas


@pytest.mark.parametrize("compiled", [True, False])
def test_merge_call_reads_assigned_values(compiled, two):
    v = on_read(two, "sum", "float32")

    def merge(strategy):
        v.assign(v + 1.0)

    def fn():
        v.assign_add(2.0)
        ks.get_replica_context().merge_call(merge)
        v.assign_add(1.0)

    two.run(fn, options=ks.RunOptions(compile=None if compiled else False))
    assert read(v) == 7.0
    assert results(two, v) == [3.5, 3.5]


def test_initial_sum_is_divided(two):
    with two.scope():
        v = keras.Variable(
            np.int32(5),
            dtype="int32",
            trainable=False,
            aggregation="sum",
            synchronization="on_read",
        )
    assert read(v) == 5
    assert results(two, v) == [3, 2]
