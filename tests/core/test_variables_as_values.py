"""Variables are distributed values: for `reduce` and its like, `run` and `update`.

On TensorFlow the same bodies run on native tf.distribute as well, whose answers are
the ones to give.
"""

import contextlib

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import APIS, Ours, is_mirrored, number, per_replica, results

AGGREGATIONS = ["sum", "mean", "only_first_replica", "none"]


@pytest.fixture(params=APIS, ids=lambda cls: cls.name)
def api(request):
    return request.param()


def on_read(api, aggregation="sum"):
    """A variable that reads 1 on the first replica, and 2 on the second."""
    s = api.strategy
    v = api.variable(
        [0.0], synchronization="on_read", aggregation=aggregation, trainable=False
    )

    def assign(x):
        v.assign(x)

    s.run(assign, args=(per_replica(s, [1.0], [2.0]),))
    return v


# --- values that are brought together


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_components_of_variable_are_reduced(aggregation, api):
    """Whatever it would read as."""
    s, v = api.strategy, on_read(api, aggregation)
    assert number(s.reduce("SUM", v, axis=None)) == [3.0]
    assert number(s.reduce("MEAN", v, axis=None)) == [1.5]
    assert number(s.reduce("SUM", v, axis=0)) == 3.0
    assert number(s.reduce("MEAN", v, axis=0)) == 1.5
    assert number(s.gather(v, axis=0)) == [1.0, 2.0]
    assert number(s.extended.reduce_to("SUM", v, destinations="/cpu:0")) == [3.0]
    to_itself = s.extended.reduce_to("MEAN", v, destinations=v)
    assert is_mirrored(to_itself) and results(s, to_itself) == [[1.5], [1.5]]
    assert results(s, v) == [[1.0], [2.0]]
    assert [number(x["v"]) for x in s.experimental_local_results({"v": v})] == [
        [1.0],
        [2.0],
    ]


def test_mirrored_variable_as_value(api):
    s, v = api.strategy, api.variable([4.0])
    # A sum of copies is refused: by native tf.distribute with an assertion.
    with pytest.raises((ValueError, AssertionError)):
        s.reduce("SUM", v, axis=None)
    assert number(s.reduce("MEAN", v, axis=None)) == [4.0]
    assert number(s.reduce("SUM", v, axis=0)) == 8.0
    assert number(s.reduce("MEAN", v, axis=0)) == 4.0
    assert number(s.gather(v, axis=0)) == [4.0, 4.0]
    results_in = s.experimental_local_results({"v": v, "n": 3})
    assert [(number(x["v"]), x["n"]) for x in results_in] == [([4.0], 3)] * 2


def test_reduced_variable_is_a_tensor(two):
    with two.scope():
        v = keras.Variable([4.0])
    before = two.reduce("MEAN", v)
    v.assign([5.0])
    assert number(before) == [4.0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("compiled", [True, False])
def test_in_merge_call(aggregation, compiled, two):
    api = Ours()
    s, v = api.strategy, on_read(api, aggregation)

    def merge(strategy, given, value):
        assert isinstance(given, keras.Variable)
        return strategy.reduce("SUM", given), strategy.reduce("SUM", value)

    def fn():
        return ks.get_replica_context().merge_call(merge, (v, v.value))

    options = ks.RunOptions(compile=None if compiled else False)
    of_variable, of_value = s.run(fn, options=options)
    assert results(s, of_variable) == results(s, of_value) == [[3.0], [3.0]]


def test_update_with_one_replica():
    one = ks.OneDeviceStrategy("cpu:0")
    for strategy in (one, ks.get_strategy()):
        with one.scope() if strategy is one else contextlib.nullcontext():
            v = keras.Variable(
                [4.0], synchronization="on_read", aggregation="sum", trainable=False
            )
        assert number(strategy.reduce("SUM", v)) == [4.0]
        assert number(strategy.gather(v, axis=0)) == [4.0]
        assert number(strategy.extended.reduce_to("SUM", v, "cpu:0")) == [4.0]
        assert number(strategy.run(lambda v: v + 1.0, (v,))) == [5.0]


# --- arguments


@pytest.mark.parametrize("compiled", [True, False])
def test_component_as_argument_of_run(compiled, two):
    api = Ours()
    s, v, w = api.strategy, api.variable([4.0]), api.variable([6.0])
    own = on_read(api, "none")
    options = ks.RunOptions(compile=None if compiled else False)

    def add(x, variables):
        assert all(isinstance(v, keras.Variable) for v in [x, *variables["of"]])
        variables["of"][0].assign_add([1.0])
        return x + variables["of"][0]

    for x, seen in [(v, [[11.0], [11.0]]), (own, [[9.0], [10.0]])]:
        out = s.run(add, (x,), {"variables": {"of": [w]}}, options)
        assert results(s, out) == seen
    # Another variable of the same shape is another argument.
    assert results(s, s.run(add, (w, {"of": [v]}), options=options)) == [[13.0]] * 2
    assert results(s, v) == [[5.0], [5.0]] and results(s, w) == [[8.0], [8.0]]


def test_variable_value_as_argument(two):
    """On TensorFlow it is native's container, which a tf.function takes for others."""
    with two.scope():
        variables = [keras.Variable([float(i)]) for i in range(3)]

    def double(x):
        return x * 2.0

    for i, v in enumerate(variables):
        assert results(two, two.run(double, (v.value,))) == [[2.0 * i]] * 2


def test_gradient_of_component_argument(two):
    with two.scope():
        v = keras.Variable([4.0])

    def fn(v):
        return ks.value_and_grad(lambda: keras.ops.sum(v * v), [v])()[1][0]

    assert results(two, two.run(fn, (v,))) == [[8.0], [8.0]]


@pytest.mark.parametrize("options", [None, ks.RunOptions(compile=False)])
def test_run_returns_variable_value(options, two):
    api = Ours()
    s, v = api.strategy, on_read(api)
    out = s.run(lambda: {"v": v}, options=options)["v"]
    assert isinstance(out, ks.PerReplica)
    assert number(s.reduce("SUM", out)) == [3.0]


# --- update


def test_update_passes_component_of_its_device(api):
    s, v, w = api.strategy, api.variable([1.0]), api.variable([10.0])

    def add(c, x, y=None):
        c.assign_add(x + y["y"])

    for _ in range(2):
        s.extended.update(v, add, args=(w,), kwargs={"y": {"y": w}})
    assert results(s, v) == [[41.0], [41.0]]
    s.extended.update(v, lambda c, x: c.assign(x + 0.0), args=(v,))
    assert results(s, v) == [[41.0], [41.0]]
    own, other = on_read(api), on_read(api)
    s.extended.update(own, lambda c, x, y: c.assign_add(x + y), args=(other, w))
    assert results(s, own) == [[12.0], [14.0]]


def swap(c, x):
    before = c + 0.0
    c.assign(x + 0.0)
    x.assign(before)


def test_update_unwraps_arguments(api):
    s, v, w = api.strategy, api.variable([1.0]), api.variable([10.0])

    s.extended.update(v, swap, args=(w,))
    assert results(s, v) == [[10.0], [10.0]] and results(s, w) == [[1.0], [1.0]]


@pytest.mark.parametrize("compiled", [True, False])
def test_update_in_merge_call(compiled, two):
    api = Ours()
    s, v, w = api.strategy, api.variable([1.0]), api.variable([10.0])
    own, other = on_read(api), on_read(api)

    def merge(strategy, w):
        strategy.extended.update(v, swap, args=(w,))
        strategy.extended.update(own, lambda c, x: c.assign_add(x), args=(other,))

    def fn():
        w.assign_add([2.0])
        ks.get_replica_context().merge_call(merge, (w,))
        s.extended.update(v, lambda c, x: c.assign_add(x), (w,))

    s.run(fn, options=ks.RunOptions(compile=None if compiled else False))
    assert results(s, v) == [[13.0], [13.0]] and results(s, w) == [[1.0], [1.0]]
    assert results(s, own) == [[2.0], [4.0]]


def test_update_refuses_per_replica_values(two):
    api = Ours()
    s, v, own = api.strategy, api.variable([1.0]), on_read(api)
    with pytest.raises(ValueError, match="may differ"):
        s.extended.update(v, lambda c, x: c.assign(x), args=(own,))
    assert results(s, v) == [[1.0], [1.0]]


def test_update_accepts_foreign_variable(two):
    outside = keras.Variable([3.0])
    with two.scope():
        v = keras.Variable([1.0])
    two.extended.update(v, lambda c, x: c.assign_add(x), args=(outside,))
    assert results(two, v) == [[4.0], [4.0]]


# --- reading outside of the replicas


@pytest.mark.parametrize("inside", [True, False])
def test_component_converts_to_tensor(inside, two):
    api = Ours()
    counter = api.variable(3, dtype="int32", trainable=False)
    v, own = api.variable([1.0, 2.0]), on_read(api, "mean")
    with api.strategy.scope() if inside else contextlib.nullcontext():
        assert int(counter.value) == 3 and float(counter.value) == 3.0
        assert complex(counter.value) == 3.0 and bool(counter.value)
        assert int(counter) == 3 and float(counter) == 3.0
        converted = keras.ops.convert_to_numpy(counter.value)
        assert converted.shape == () and converted == 3
        assert converted.dtype == "int32"
        assert keras.ops.convert_to_numpy(v.value).tolist() == [1.0, 2.0]
        assert keras.ops.convert_to_numpy(own.value).tolist() == [1.5]
        assert np.array(v).tolist() == [1.0, 2.0]
        assert np.asarray(v, dtype="float64").dtype == "float64"
        counter.assign(0)
        assert not bool(counter.value)
        assert [float(x) for x in v.value] == [1.0, 2.0]
    assert results(api.strategy, counter) == [0, 0]
