"""Variables in replica and cross-replica context, as tf.distribute has them."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import APIS, number, per_replica, results


@pytest.fixture(params=APIS, ids=lambda cls: cls.name)
def api(request):
    return request.param()


def assign(variable):
    def fn(x):
        variable.assign(x)

    return fn


def add(variable):
    def fn(x):
        variable.assign_add(x)

    return fn


def test_addition_to_sum(api):
    v = api.variable(0.0, aggregation="sum", trainable=False)
    s = api.strategy
    s.run(add(v), args=(per_replica(s, 1.0, 3.0),))
    assert results(s, v) == [4.0, 4.0]


def test_no_aggregation_writes_per_replica_values(api):
    v, s = api.variable(1.0), api.strategy
    s.run(add(v), args=(1.0,))
    assert results(s, v) == [2.0, 2.0]
    s.run(assign(v), args=(per_replica(s, 1.0, 3.0),))
    assert results(s, v) == [1.0, 3.0]
    v.assign(7.0)
    assert results(s, v) == [7.0, 7.0]
    with s.scope():
        v.assign(8.0)
    assert results(s, v) == [8.0, 8.0]


@pytest.mark.parametrize(("aggregation", "total"), [("sum", 4.0), ("mean", 2.0)])
def test_on_read_variable(aggregation, total, api):
    s = api.strategy
    v = api.variable(
        0.0, synchronization="on_read", aggregation=aggregation, trainable=False
    )
    s.run(add(v), args=(per_replica(s, 1.0, 3.0),))
    assert results(s, v) == [1.0, 3.0]
    assert float(v.numpy()) == total
    seen = s.run(lambda: v + 0.0)
    assert results(s, seen) == [1.0, 3.0]
    with s.scope():
        v.assign(10.0)
    assert results(s, v) == [5.0, 5.0] if aggregation == "sum" else [10.0, 10.0]
    assert float(v.numpy()) == 10.0


def test_foreign_variables_are_readable(two, mirrored):
    outside = keras.Variable(3.0)
    with mirrored(3).scope():
        others = keras.Variable(4.0)
    assert results(two, two.run(lambda: outside + 1.0)) == [4.0, 4.0]
    assert results(two, two.run(lambda: others + 1.0)) == [5.0, 5.0]
    assert not two.extended.variable_created_in_scope(outside)


def test_local_results_of_foreign_variable(two):
    outside = keras.Variable(3.0)
    (value,) = two.experimental_local_results(outside)
    assert number(value) == 3.0


def test_assigning_foreign_variable_in_run_is_refused(two):
    outside = keras.Variable(1.0)

    def add():
        outside.assign_add(1.0)

    if keras.backend.backend() == "tensorflow":
        # What was traced before would go on reading the tensor that it had.
        with pytest.raises(ValueError, match="created outside the scope"):
            two.run(add)
        return
    two.run(add)
    assert outside.numpy() == 2.0


OPTIMIZERS = {
    "assign_sub": lambda: keras.optimizers.SGD(0.5),
    "assign_add": lambda: keras.optimizers.SGD(0.5, momentum=0.5, nesterov=True),
    "assign": lambda: keras.optimizers.Ftrl(0.5),
}


@pytest.mark.needs_patch(
    "backends.tensorflow.patches Optimizer.add_variable_from_reference",
    "Optimizer.assign",
    backend="tensorflow",
    case="assign",
)
@pytest.mark.needs_patch(
    "Optimizer.assign_add", backend="tensorflow", case="assign_add"
)
@pytest.mark.needs_patch(
    "Optimizer.assign_sub", backend="tensorflow", case="assign_sub"
)
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_optimizer_of_foreign_variable_in_run_is_refused(method, two):
    make = OPTIMIZERS[method]
    outside, alone = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    with two.scope():
        optimizer = make()

    def step():
        optimizer.apply([keras.ops.ones(2)], [outside])

    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match="created outside the scope"):
            two.run(step)
        return
    two.run(step)
    make().apply([2 * keras.ops.ones(2)], [alone])
    np.testing.assert_allclose(outside.numpy(), alone.numpy(), atol=1e-6)


def test_replica_dependent_structure_is_refused(two):
    def fn():
        replica = ks.get_replica_context().replica_id_in_sync_group
        return [np.float32(1)] if replica == 0 else {"a": np.float32(1)}

    with pytest.raises(ValueError, match="same structure"):
        two.run(fn, options=ks.RunOptions(compile=False))


def test_gather_of_uneven_rows(api):
    s = api.strategy
    rows = per_replica(s, [1, 2, 3, 4], [5, 6])

    def fn(x):
        return api.get_replica_context().all_gather(x, axis=0)

    assert results(s, s.run(fn, args=(rows,))) == [[1, 2, 3, 4, 5, 6]] * 2


class Doubled(keras.Variable):
    """A user's variable, which reads as twice what is stored."""

    @property
    def value(self):
        return super().value * 2


def test_variable_of_user_class(two):
    with two.scope():
        v = Doubled(3.0)
    assert isinstance(v, Doubled)
    assert number(v.value) == 6.0
    assert results(two, two.run(lambda: v + 0.0)) == [6.0, 6.0]
    v.assign(4.0)
    assert number(v.value) == 8.0


def test_paths_do_not_depend_on_scope(two):
    def paths():
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        return [v.path for v in (*model.variables, keras.Variable(1.0), Doubled(1.0))]

    expected = paths()
    with two.scope():
        assert paths() == expected
