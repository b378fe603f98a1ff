"""The interface for library authors: update, reduce_to and their companions.

On TensorFlow the same bodies run on native tf.distribute as well, whose answers are
the ones to give.
"""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import APIS, DEVICES, is_mirrored, number, per_replica, results


@pytest.fixture(params=APIS, ids=lambda cls: cls.name)
def api(request):
    return request.param()


# --- update


def test_update_runs_per_device(api):
    s, v = api.strategy, api.variable([1.0, 2.0])
    x = keras.ops.convert_to_tensor(np.float32([3.0, 4.0]))
    out = s.extended.update(v, lambda c, x: c.assign_add(x), args=(x,))
    assert is_mirrored(out) and results(s, out) == [[4.0, 6.0]] * 2
    assert results(s, v) == [[4.0, 6.0]] * 2
    s.extended.update(v, lambda c, x=0: c.assign_sub(x), kwargs={"x": x})
    s.extended.update(v, lambda c: c.assign(c * 2 + 1))
    assert results(s, v) == [[3.0, 5.0]] * 2


def test_update_without_grouping(api):
    s, v = api.strategy, api.variable(1.0)
    out = s.extended.update(v, lambda c, x: c.assign(x), args=(3.0,), group=False)
    assert isinstance(out, tuple) and [number(x) for x in out] == [3.0, 3.0]


def test_update_return_values(api):
    s, v = api.strategy, api.variable(1.0)
    assert s.extended.update(v, lambda c: None) is None
    assert s.extended.update(v, lambda c: 5) == 5
    # Native's has one None for all replicas.
    nothing = s.extended.update(v, lambda c: None, group=False)
    assert nothing == (None,) * (2 if api.name == "ours" else 1)


def test_update_runs_on_variables_device(api):
    s, v = api.strategy, api.variable(1.0)
    seen = []
    s.extended.update(v, lambda c: seen.append((c.device, c.shape, c.name)))
    assert [device[-5:].lower() for device, _, _ in seen] == DEVICES
    assert all(tuple(shape) == () for _, shape, _ in seen)
    assert {name.split(":")[0].split("/")[0] for _, _, name in seen} == {
        v.name.split(":")[0]
    }


def test_reduce_to_and_update(api):
    s, v = api.strategy, api.variable([1.0, 2.0])
    x = per_replica(s, [1, 2], [3, 5])
    total = s.extended.reduce_to("SUM", x, destinations=v)
    assert is_mirrored(total) and results(s, total) == [[4.0, 7.0]] * 2
    s.extended.update(v, lambda c, t: c.assign_sub(t), args=(total,))
    assert results(s, v) == [[-3.0, -5.0]] * 2


@pytest.mark.parametrize("group", [True, False])
def test_update_in_merge_call(group, api):
    s, v = api.strategy, api.variable([1.0, 2.0])
    x = per_replica(s, [1, 2], [3, 5])

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=v)
        out = strategy.extended.update(
            v, lambda c, t: c.assign_sub(t), args=(total,), group=group
        )
        return out if group else out[0]

    def fn(x):
        new = api.get_replica_context().merge_call(merge, args=(x,))
        return keras.ops.convert_to_tensor(new) + 0.0, v + 0.0

    new, seen = s.run(fn, args=(x,))
    assert results(s, seen) == [[-3.0, -5.0]] * 2
    assert results(s, v) == [[-3.0, -5.0]] * 2
    assert results(s, new)[0] == [-3.0, -5.0]


def test_update_in_merge_call_without_compiling(two):
    with two.scope():
        v = keras.Variable([1.0, 2.0])
        own = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", trainable=False
        )
    x = per_replica(two, [1, 2], [3, 5])

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=v)
        strategy.extended.update(v, lambda c, t: c.assign_sub(t), args=(total,))
        first = ks.PerReplica([value[0] for value in x.values])
        strategy.extended.update(own, lambda c, x: c.assign_add(x), args=(first,))
        return strategy.experimental_local_results(v)[0]

    def fn(x):
        return ks.get_replica_context().merge_call(merge, args=(x,)), v + 0.0

    for run in (1, 2):
        out, seen = two.run(fn, args=(x,), options=ks.RunOptions(compile=False))
        expected = [1.0 - 4 * run, 2.0 - 7 * run]
        for value in (out, seen, v):
            assert results(two, value) == [expected] * 2
        assert results(two, own) == [1.0 * run, 3.0 * run]


def test_update_of_on_read_variable(api):
    s = api.strategy
    v = api.variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    x = per_replica(s, 1.0, 3.0)
    s.extended.update(v, lambda c, x: c.assign_add(x), args=(x,))
    assert results(s, v) == [1.0, 3.0]
    assert float(v.numpy()) == 4.0
    s.extended.update(v, lambda c: c.assign(c + 1.0))
    assert results(s, v) == [2.0, 4.0]


def test_updates_around_run(two):
    with two.scope():
        v, w = keras.Variable(1.0), keras.Variable(10.0)

    def add():
        v.assign_add(w * 1.0)

    for _ in range(3):
        two.run(add)
        w_now = two.extended.reduce_to("mean", per_replica(two, 2.0, 4.0), v)
        two.extended.update(w, lambda c, x: c.assign_add(x), args=(w_now,))
        two.extended.update(v, lambda c, x: c.assign_add(x), args=(w.value,))
    # v: 1 +10+13 +13+16 +16+19; w: 10+3+3+3
    assert results(two, v) == [88.0, 88.0] and number(v.value) == 88.0
    assert results(two, w) == [19.0, 19.0]
    two.extended.update(v, lambda c, x: c.assign(x), args=(w.value,))
    two.run(add)
    assert results(two, v) == [38.0, 38.0] and results(two, w) == [19.0, 19.0]


def test_update_refuses_differing_values(two):
    with two.scope():
        v = keras.Variable(1.0)
    x = per_replica(two, 1.0, 3.0)
    with pytest.raises(ValueError, match=r"reduce_to\('sum'"):
        two.extended.update(v, lambda c, x: c.assign(x), args=(x,))
    with pytest.raises(ValueError, match="may differ"):
        two.extended.update(v, lambda c, x: c.assign(x["x"]), kwargs={"x": {"x": x}})
    assert results(two, v) == [1.0, 1.0]


def test_update_refuses_bad_arguments(two, mirrored):
    outside = keras.Variable(1.0)
    with mirrored(3).scope():
        others = keras.Variable(1.0)
    with two.scope():
        v = keras.Variable([1.0, 2.0])
    for variable in (outside, others):
        with pytest.raises(ValueError, match="created outside the scope"):
            two.extended.update(variable, lambda c: c.assign(2.0))
    with pytest.raises(TypeError, match="`var` must be a `keras.Variable`"):
        two.extended.update(keras.ops.ones(()), lambda c: c)
    with pytest.raises(TypeError, match="`fn` must be a function"):
        two.extended.update(v, 3)
    with pytest.raises(ValueError, match="`args` must be a tuple"):
        two.extended.update(v, lambda c, x: c, args=3.0)
    with pytest.raises(ValueError, match=r"shape, \(2,\).*shape \(3,\)"):
        two.extended.update(v, lambda c: c.assign(np.ones(3)))
    with mirrored(3).scope(), pytest.raises(RuntimeError, match="Mixing different"):
        two.extended.update(v, lambda c: c.assign([3.0, 3.0]))
    assert results(two, v) == [[1.0, 2.0]] * 2


def test_exception_in_update_changes_nothing(two):
    with two.scope():
        v = keras.Variable(1.0)

    def fail(component):
        component.assign(5.0)
        if component.device == "cpu:1":
            raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError, match="boom"):
        two.extended.update(v, fail)
    assert results(two, v) == [1.0, 1.0] and not ks.has_strategy()


def test_update_inside_replica_is_refused(api):
    """It leaves the replicas for all of them, as `merge_call` does."""
    s, v = api.strategy, api.variable(1.0)

    def fn():
        s.extended.update(v, lambda c, x: c.assign_add(x), args=(2.0,))
        return v + 0.0

    assert results(s, s.run(fn)) == [3.0, 3.0]
    assert results(s, v) == [3.0, 3.0]


def test_update_refuses_tensors_of_replica(two):
    with two.scope():
        v = keras.Variable(1.0)

    def fn(x):
        two.extended.update(v, lambda c, x: c.assign(x), args=(x,))

    with pytest.raises(ValueError, match="may differ"):
        two.run(fn, args=(per_replica(two, 1.0, 3.0),))
    assert results(two, v) == [1.0, 1.0]


def one_replica():
    return [ks.OneDeviceStrategy("cpu:0"), ks.get_strategy()]


@pytest.mark.parametrize("strategy", one_replica(), ids=["one", "default"])
def test_update_with_one_replica(strategy):
    if ks.get_strategy() is strategy:
        v = keras.Variable(1.0)
    else:
        with strategy.scope():
            v = keras.Variable(1.0)
    extended = strategy.extended
    assert extended.variable_created_in_scope(v)
    assert number(extended.update(v, lambda c, x: c.assign_add(x), (2.0,))) == 3.0
    assert number(v.value) == 3.0
    (out,) = extended.update(v, lambda c: c.assign_sub(1.0), group=False)
    assert number(out) == 2.0
    x = keras.ops.convert_to_tensor(np.float32(2.0))
    for destinations in (v, x, "cpu:0"):
        assert number(extended.reduce_to("SUM", x, destinations)) == 2.0
    pairs = [(x, v), (x, x)]
    assert [number(y) for y in extended.batch_reduce_to("MEAN", pairs)] == [2.0, 2.0]
    (component,) = strategy.experimental_local_results(v)
    assert extended.value_container(component) is v


# --- reduce_to


def test_reduce_to(api):
    s, v = api.strategy, api.variable(0.0)
    sc, a = per_replica(s, 1.0, 3.0), per_replica(s, [1, 2], [3, 5])
    with s.scope():
        total = s.extended.reduce_to("sum", sc, destinations=v)
    assert is_mirrored(total) and results(s, total) == [4.0, 4.0]
    to_device = s.extended.reduce_to("MEAN", sc, destinations="/cpu:0")
    assert number(to_device) == 2.0 and not is_mirrored(to_device)
    to_itself = s.extended.reduce_to("SUM", a, destinations=a)
    assert is_mirrored(to_itself) and results(s, to_itself) == [[4.0, 7.0]] * 2
    again = s.extended.reduce_to("MEAN", total, destinations=v)
    assert is_mirrored(again) and results(s, again) == [4.0, 4.0]
    outside = keras.Variable(0.0)
    if api.name == "ours":
        assert number(s.extended.reduce_to("SUM", sc, outside)) == 4.0


def test_batch_reduce_to(api):
    s, v = api.strategy, api.variable(0.0)
    sc, a = per_replica(s, 1.0, 3.0), per_replica(s, [1, 2], [3, 5])
    out = s.extended.batch_reduce_to("SUM", [(sc, v), (a, v)])
    assert isinstance(out, list) and all(is_mirrored(value) for value in out)
    assert [results(s, value) for value in out] == [[4.0, 4.0], [[4.0, 7.0]] * 2]


def test_reduce_to_refuses_bad_arguments(two):
    with two.scope():
        v = keras.Variable(0.0)
    sc = per_replica(two, 1.0, 3.0)
    reduce_to = two.extended.reduce_to
    with pytest.raises(ValueError, match="not distributed"):
        reduce_to("SUM", keras.ops.ones(()), destinations="/cpu:0")
    with pytest.raises(ValueError, match="not distributed"):
        reduce_to("SUM", reduce_to("SUM", sc, v), v)
    with pytest.raises(ValueError, match="reduce_op='max'"):
        reduce_to("max", sc, v)
    with pytest.raises(ValueError, match="devices that are not available"):
        reduce_to("SUM", sc, "cpu:77")
    for destinations in ([v], None, 3):
        with pytest.raises(TypeError, match="`destinations` must be"):
            reduce_to("SUM", sc, destinations)
    with pytest.raises(TypeError, match="`ks.experimental.CommunicationOptions`"):
        reduce_to("SUM", sc, v, options="ring")
    with pytest.raises(ValueError, match="(?s)numbers.*Received"):
        reduce_to("SUM", ks.PerReplica(["a", "b"]), v)
    with pytest.raises(ValueError, match="pairs of a value"):
        two.extended.batch_reduce_to("SUM", [sc, v])
    with pytest.raises(RuntimeError, match=r"merge_call\(\)"):
        two.run(lambda: reduce_to("SUM", sc, v))
    with pytest.raises(RuntimeError, match=r"merge_call\(\)"):
        two.run(lambda: two.extended.batch_reduce_to("SUM", [(sc, v)]))


def test_mirrored_value_in_run(two):
    with two.scope():
        v = keras.Variable(0.0)
    total = two.extended.reduce_to("SUM", per_replica(two, 1.0, 3.0), v)
    assert results(two, two.run(lambda x: x + 1, args=(total,))) == [5.0, 5.0]
    assert results(two, v) == [0.0, 0.0]


# --- the rest


def test_value_container(api):
    s, v = api.strategy, api.variable(1.0)
    for component in s.experimental_local_results(v):
        assert s.extended.value_container(component) is v
    assert s.extended.value_container(3) == 3
    x = keras.ops.ones(())
    assert s.extended.value_container(x) is x
    if api.name == "ours":
        found = []
        s.extended.update(v, lambda c: found.append(s.extended.value_container(c)))
        assert [f is v for f in found] == [True, True]


def test_value_container_is_the_last_variable(two):
    first = keras.Variable(1.0)
    second = keras.Variable(first.value)  # on JAX with the same array
    for variable in (first, second):
        (component,) = two.extended.local_components(variable)
    assert two.extended.value_container(component) is second


def test_component_outlives_variable(two):
    with two.scope():
        v = keras.Variable(1.0)
    components = two.experimental_local_results(v)
    copies = [keras.ops.copy(c) for c in components]
    for copy in copies:
        assert two.extended.value_container(copy) is copy


def test_colocate_vars_with(api):
    s, v = api.strategy, api.variable(1.0)
    with s.scope(), s.extended.colocate_vars_with(v):
        slot = api.variable(2.0)
    assert s.extended.variable_created_in_scope(slot)
    assert results(s, slot) == [2.0, 2.0]
    with pytest.raises(RuntimeError), s.extended.colocate_vars_with(v):
        pass
    outside = keras.Variable(1.0)
    outside = outside if api.name == "ours" else outside.value
    with (
        s.scope(),
        pytest.raises(ValueError, match="colocate_"),
        s.extended.colocate_vars_with(outside),
    ):
        pass


def test_parameter_and_worker_devices(api):
    extended = api.strategy.extended
    for names in (extended.worker_devices, extended.parameter_devices):
        assert isinstance(names, tuple)
        assert [name[-5:].lower() for name in names] == DEVICES
    assert extended.experimental_require_static_shapes is False
