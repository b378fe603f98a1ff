"""run, reduce and what a replica can ask of the others.

The expectations are those of native tf.distribute, which were recorded with
TensorFlow 2.21 on two logical CPUs.
"""

import threading

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import number, results


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda c: keras.ops.convert_to_tensor(
            np.asarray(values[c.replica_id_in_sync_group])
        )
    )


def floats(*values):
    return [np.asarray(v, "float32") for v in values]


def test_run_returns_per_replica_values(two):
    x = per_replica(two, *floats(1.0, 3.0))
    out = two.run(lambda x: {"a": x, "b": [x + 1, None], "c": ("s", 3)}, args=(x,))
    assert results(two, out["a"]) == [1.0, 3.0]
    assert results(two, out["b"][0]) == [2.0, 4.0]
    assert out["b"][1] is None and out["c"] == ("s", 3)
    assert isinstance(out["a"], ks.PerReplica)
    assert two.run(lambda: None) is None
    assert two.run(lambda: 5) == 5


def test_run_unwraps_arguments(two):
    x = per_replica(two, *floats(1.0, 3.0))
    assert results(two, two.run(lambda a, b: a + b[0], args=[x, [x]])) == [2.0, 6.0]
    kwargs = {"y": x}
    assert results(two, two.run(lambda x, y: x + y, (x,), kwargs)) == [2.0, 6.0]
    plain = keras.ops.convert_to_tensor(np.float32([1.0, 2.0]))
    assert results(two, two.run(lambda x: x * 2, (plain,))) == [[2.0, 4.0]] * 2


def test_replica_ids_are_ordered(mirrored):
    strategy = mirrored(3)
    ids = strategy.run(
        lambda: keras.ops.convert_to_tensor(
            ks.get_replica_context().replica_id_in_sync_group, "int32"
        )
    )
    assert results(strategy, ids) == [0, 1, 2]


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("SUM", None, [4.0, 7.0]),
        ("mean", None, [2.0, 3.5]),
        ("sum", 0, 11.0),
        (ks.ReduceOp.MEAN, 0, 2.75),
    ],
)
def test_reduce(op, axis, expected, two):
    value = per_replica(two, *floats([1, 2], [3, 5]))
    assert number(two.reduce(op, value, axis=axis)) == expected


def test_reduce_of_partial_batches(two):
    value = per_replica(two, *floats([1, 2, 3, 4], [5, 6]))
    assert number(two.reduce("MEAN", value, axis=0)) == 3.5
    assert number(two.reduce("SUM", value, axis=0)) == 21.0
    with pytest.raises(ValueError, match=r"\(4,\).*\(2,\)"):
        two.reduce("SUM", value, axis=None)


def test_reduce_with_empty_replica(two):
    value = per_replica(two, *floats([1, 2], np.zeros(0)))
    assert number(two.reduce("MEAN", value, axis=0)) == 1.5


def test_reduce_of_structure(two):
    a, b = per_replica(two, *floats([1, 2], [3, 5])), per_replica(two, *floats(1, 3))
    out = two.reduce("SUM", {"x": a, "y": (b,)})
    assert number(out["x"]) == [4.0, 7.0] and number(out["y"][0]) == 4.0


def test_reduce_of_integers(two):
    value = per_replica(two, np.int32(1), np.int32(2))
    assert number(two.reduce("MEAN", value)) == 1.5
    rows = per_replica(two, np.int32([1, 2]), np.int32([4, 6]))
    assert number(two.reduce("MEAN", rows, axis=0)) == 3.25


def test_reduce_over_other_axes(two):
    ones = per_replica(two, *floats(np.ones((2, 3)), np.ones((2, 3))))
    assert number(two.reduce("SUM", ones, axis=1)) == [6.0, 6.0]
    assert number(two.reduce("MEAN", ones, axis=(0, 1))) == 1.0
    with pytest.raises(ValueError, match="axis"):
        two.reduce("SUM", per_replica(two, *floats(1, 3)), axis=0)


def test_reduce_of_undistributed_value(two):
    plain = keras.ops.convert_to_tensor(np.float32([1.0, 2.0]))
    assert number(two.reduce("MEAN", plain)) == [1.0, 2.0]
    assert number(two.reduce("SUM", plain, axis=0)) == 6.0  # every replica has it
    assert number(two.reduce("MEAN", plain, axis=0)) == 1.5
    with pytest.raises(ValueError, match="not distributed"):
        two.reduce("SUM", plain)
    assert number(ks.OneDeviceStrategy("cpu:0").reduce("SUM", plain)) == [1.0, 2.0]


def test_gather(two):
    even = per_replica(two, *floats([1, 2], [3, 5]))
    uneven = per_replica(two, *floats([1, 2, 3, 4], [5, 6]))
    assert number(two.gather(even, axis=0)) == [1.0, 2.0, 3.0, 5.0]
    assert number(two.gather({"a": uneven}, axis=0)["a"]) == [1, 2, 3, 4, 5, 6]
    columns = per_replica(two, *floats(np.ones((2, 1)), np.zeros((2, 2))))
    assert number(two.gather(columns, axis=1)) == [[1, 0, 0]] * 2
    assert number(two.gather(columns, axis=-1)) == [[1, 0, 0]] * 2
    assert two.gather(3, axis=0) == 3


def test_gather_of_numpy_arrays(two):
    rows = ks.PerReplica([np.float32([[1.0]]), np.float32([[2.0], [3.0]])])
    assert number(two.gather(rows, axis=0)) == [[1.0], [2.0], [3.0]]


def test_gather_refuses_bad_arguments(two):
    with pytest.raises(ValueError, match=r"\(2, 1\), \(2, 2\)"):
        two.gather(per_replica(two, *floats(np.ones((2, 1)), np.ones((2, 2)))), 0)
    with pytest.raises(ValueError, match="rank 1 or more"):
        two.gather(per_replica(two, *floats(1.0, 3.0)), axis=0)
    with pytest.raises(RuntimeError, match=r"all_gather\(\)"):
        two.run(lambda: two.gather(keras.ops.ones((1,)), axis=0))
    ones = per_replica(two, *floats([1.0], [1.0]))
    assert number(two.gather(ones, axis=0)) == [1.0, 1.0]


def test_collectives_of_workers(two):
    x = per_replica(two, *floats([1, 2], [3, 5]))
    context = ks.get_replica_context

    def ask(x):
        return (
            context().all_reduce("SUM", x),
            context().all_reduce("mean", {"k": x})["k"],
            context().all_gather(x, axis=0),
        )

    total, mean, rows = two.run(ask, args=(x,))
    assert results(two, total) == [[4.0, 7.0]] * 2
    assert results(two, mean) == [[2.0, 3.5]] * 2
    assert results(two, rows) == [[1.0, 2.0, 3.0, 5.0]] * 2


def test_merge_call(two):
    x = per_replica(two, *floats(1.0, 3.0))

    def merge(strategy, value):
        assert strategy is two and ks.in_cross_replica_context()
        return strategy.reduce("SUM", value, axis=None)

    def fn(x):
        return ks.get_replica_context().merge_call(merge, args=(x,))

    assert results(two, two.run(fn, args=(x,))) == [4.0, 4.0]


@pytest.mark.parametrize("compiled", [True, False])
def test_run_inside_merge_call(two, compiled):
    """The replicas wait for it to end, and could not run anything."""
    options = ks.RunOptions(compile=compiled)

    def fn():
        replica = ks.get_replica_context()
        return replica.merge_call(lambda strategy: strategy.run(lambda: 1))

    for strategy in (two, ks.OneDeviceStrategy("cpu:0")):
        with pytest.raises(RuntimeError, match="`run` was called inside `merge_call`"):
            strategy.run(fn, options=options)
        assert strategy.run(lambda: 1) == 1


@pytest.mark.needs_patch("Variable.assign", backend="torch")
@pytest.mark.parametrize(
    ("aggregation", "dtype", "expected"),
    [
        ("mean", "float32", 2.0),
        ("mean", "int32", 2.0),
        ("sum", "float32", 4.0),
        ("only_first_replica", "float32", 1.0),
    ],
)
def test_mirrored_variable_assignment(aggregation, dtype, expected, two):
    with two.scope():
        v = keras.Variable(0, dtype=dtype, aggregation=aggregation, trainable=False)
    x = per_replica(two, *np.array([1, 3], dtype))

    def assign(x):
        v.assign(x)

    two.run(assign, args=(x,))
    assert number(v.value) == expected
    assert results(two, v) == [expected] * 2


@pytest.mark.needs_patch("Variable.assign_add", "Variable.assign_sub", backend="torch")
@pytest.mark.parametrize(("aggregation", "expected"), [("mean", 12.0), ("sum", 14.0)])
def test_mirrored_variable_addition(aggregation, expected, two):
    with two.scope():
        v = keras.Variable(10.0, aggregation=aggregation, trainable=False)
    x = per_replica(two, *floats(1.0, 3.0))

    def add(x):
        v.assign_add(x)

    two.run(add, args=(x,))
    assert number(v.value) == expected

    def subtract(x):
        v.assign_sub(x)

    two.run(subtract, args=(x,))
    assert number(v.value) == 10.0


def test_metric_counts_on_every_replica(two):
    with two.scope():
        metric = keras.metrics.Mean()
    x = per_replica(two, *floats([1.0, 2.0], [6.0]))
    if keras.backend.backend() == "jax":
        x = per_replica(two, *floats([1.0, 2.0], [3.0, 6.0]))

    def update(x):
        metric.update_state(x)

    two.run(update, args=(x,))
    assert number(metric.result()) == 3.0
    metric.reset_state()
    two.run(update, args=(x,))
    assert number(metric.result()) == 3.0


@pytest.mark.needs_patch("Optimizer.apply", backend="torch")
def test_custom_training_step(two):
    """Plainly summed gradients, of losses that one divides oneself."""

    def model_and_optimizer():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    x = np.random.RandomState(0).randn(4, 2).astype("float32")

    def step(model, optimizer, x, rows):
        def loss():
            return keras.ops.sum(keras.ops.square(model(x))) / rows

        value, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return value

    plain = model_and_optimizer()
    value = step(*plain, x, 4)
    with two.scope():
        mine = model_and_optimizer()
    shards = per_replica(two, x[:2], x[2:])

    def replica_step(x):
        return step(*mine, x, 4)

    losses = two.run(replica_step, args=(shards,))
    assert abs(number(two.reduce("SUM", losses)) - number(value)) < 1e-6
    for a, b in zip(plain[0].get_weights(), mine[0].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_exception_is_reraised_and_rolls_back(two):
    with two.scope():
        v = keras.Variable(1.0)

    def fail():
        v.assign(5.0)
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError, match="boom"):
        two.run(fail)
    assert number(v.value) == 1.0 and results(two, v) == [1.0, 1.0]
    assert two.run(lambda: 1) == 1
    assert not ks.has_strategy()


def test_strategies_in_two_threads(mirrored):
    """Each of them sees its own contexts, and their collectives do not mix."""
    seen = {}

    def work(replicas):
        strategy = mirrored(replicas)

        def count():
            context = ks.get_replica_context()
            assert context.strategy is strategy
            return context.all_reduce("SUM", keras.ops.ones(()))

        counts = [results(strategy, strategy.run(count)) for _ in range(10)]
        with strategy.scope():
            seen[replicas] = (counts, ks.get_strategy() is strategy)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {n: ([[float(n)] * n] * 10, True) for n in (2, 3)}


def test_bad_arguments_are_refused(two):
    with pytest.raises(ValueError, match="`args` must be a tuple or list"):
        two.run(lambda x: x, args=3)
    with pytest.raises(TypeError, match="`fn` must be a function"):
        two.run(3)
    with pytest.raises(ValueError, match="reduce_op='max'"):
        two.reduce("max", 1.0)


def test_local_results(two):
    x = per_replica(two, *floats(1.0, 3.0))
    assert results(two, x) == [1.0, 3.0]
    assert two.experimental_local_results(3) == (3,)
    first, second = two.experimental_local_results({"a": x, "b": 1})
    assert (number(first["a"]), number(second["a"])) == (1.0, 3.0)
    assert (first["b"], second["b"]) == (1, 1)


@pytest.mark.needs_patch("Variable.__init__", backend="torch")
def test_strategy_variables(mirrored):
    first, second = mirrored(2), mirrored(3)
    outside = keras.Variable(1.0)
    with first.scope():
        inside = keras.Variable(1.0)
    assert first.extended.variable_created_in_scope(inside)
    assert not second.extended.variable_created_in_scope(inside)
    assert not first.extended.variable_created_in_scope(outside)
    with pytest.raises(TypeError, match="keras.Variable"):
        first.extended.variable_created_in_scope(3)


def test_run_with_one_replica():
    strategy = ks.OneDeviceStrategy("cpu:0")
    assert strategy.run(lambda: 3) == 3
    total = strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert number(total) == 2.0
    merged = strategy.run(
        lambda: ks.get_replica_context().merge_call(lambda s, x: x + 1, args=(2,))
    )
    assert merged == 3


def test_value_and_grad_with_auxiliary_outputs():
    v = keras.Variable(3.0)

    def fn(x):
        return x * v * v, {"twice": x * 2}

    (value, aux), (gradient,) = ks.value_and_grad(fn, [v], has_aux=True)(
        keras.ops.convert_to_tensor(2.0)
    )
    assert (number(value), number(aux["twice"]), number(gradient)) == (18.0, 4.0, 12.0)


def test_second_order_gradients(two):
    """A penalty on gradients, as of WGAN-GP, also where replicas add up in between."""
    with two.scope():
        v = keras.Variable(3.0)

    def of_squares(total):
        def squares(x):
            return keras.ops.square(total(x * v))

        def penalty(x):
            value, (gradient,) = ks.value_and_grad(squares, [v])(x)
            return value * 0.0 + keras.ops.square(gradient)

        return ks.value_and_grad(penalty, [v])

    def alone(x):
        return of_squares(lambda y: y)(x)

    def together(x):
        return of_squares(lambda y: ks.get_replica_context().all_reduce("sum", y))(x)

    x = per_replica(two, *floats(1.0, 2.0))
    value, (gradient,) = two.run(alone, (x,))
    # (2 x^2 v)^2, and what it grows by with v
    assert results(two, value) == [36.0, 576.0]
    assert results(two, gradient) == [24.0, 384.0]
    # The sum of what the replicas give: 16 (v + 2 v)^2 (1 + 4) for both of them.
    value, (gradient,) = two.run(together, (x,))
    assert results(two, value) == [1296.0, 5184.0]
    assert results(two, gradient) == [1440.0, 2880.0]


# float32 has no such number.
WHOLE = np.int32(2**24 + 1)


def of_two_dtypes(strategy):
    values = [WHOLE, np.float32(0.5)]
    return strategy.experimental_distribute_values_from_function(
        lambda c: keras.ops.convert_to_tensor([values[c.replica_id_in_sync_group]])
    )


def test_mixed_dtypes_per_replica(two):
    """No engine casts what a replica is given."""
    out = two.run(lambda x: x + x, (of_two_dtypes(two),))

    parts = two.experimental_local_results(out)
    dtypes = [keras.backend.standardize_dtype(part.dtype) for part in parts]
    assert dtypes == ["int32", "float32"]
    assert [number(part) for part in parts] == [[2 * int(WHOLE)], [1.0]]


@pytest.mark.parametrize("by", ["reduce", "gather", "all_reduce", "all_gather"])
def test_mixed_dtypes_are_not_reduced(by, two):
    values = of_two_dtypes(two)
    of_replicas = {
        "all_reduce": lambda x: ks.get_replica_context().all_reduce("SUM", x),
        "all_gather": lambda x: ks.get_replica_context().all_gather(x, axis=0),
    }

    with pytest.raises(ValueError, match="int32.*float32.*Cast"):
        if by == "reduce":
            two.reduce("SUM", values, axis=None)
        elif by == "gather":
            two.gather(values, axis=0)
        else:
            two.run(of_replicas[by], (values,))
