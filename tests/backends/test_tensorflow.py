"""TensorFlow's native tf.distribute as the oracle, and tf.function."""

import contextlib
import functools
import gc
import weakref

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Tests of the TensorFlow adapter", allow_module_level=True)

import tensorflow as tf

import keras_strategy as ks
from keras_strategy.backends.tensorflow.tensors import concat_values
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.variables_optimizers import adopt
from tests.distributed import tensorflow_jobs as jobs


@pytest.fixture(params=[2, 3], ids="{} replicas".format)
def strategy(request):
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


@pytest.fixture
def two():
    return ks.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def native():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


def per_replica(*values):
    return ks.PerReplica(values)


def native_per_replica(native, *values):
    return native.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


# --- variables of TensorFlow's own


def test_native_variables_have_components(two, native):
    for strategy in (two, native):
        with strategy.scope():
            variable = tf.Variable(1.0)
        strategy.run(lambda v=variable: v.assign_add(2.0))
        found = strategy.experimental_local_results(variable)
        assert [v.numpy() for v in found] == [3.0, 3.0]
    # In a structure, which native takes for one value.
    of_structure = two.experimental_local_results({"v": variable, "n": 1})
    assert [(x["v"].numpy(), x["n"]) for x in of_structure] == [(3.0, 1)] * 2
    three = ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(ValueError, match="experimental_local_results"):
        three.experimental_local_results(variable)


def test_native_variable_created_in_run(two):
    with pytest.raises(Exception, match="Unable to lift") as raised:
        two.run(lambda: tf.Variable(1.0).read_value())
    (note,) = raised.value.__notes__
    assert "in the strategy's scope, before `strategy.run`" in note


# --- devices


def test_logical_devices_have_threads_to_wait_in():
    assert tf.config.threading.get_inter_op_parallelism_threads() >= 2 * 4 + 2


def test_set_logical_devices_twice():
    ks.MirroredStrategy()
    ks.config.set_logical_devices("cpu", 4)
    with pytest.raises(RuntimeError, match="already initialized 4 cpu"):
        ks.config.set_logical_devices("cpu", 3)


def test_missing_device_type_is_refused():
    assert get_engine().list_devices("tpu") == []


# --- reduce and gather, with native tf.distribute as the oracle


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize(
    ("values", "axis"),
    [
        (([1.0, 2.0], [3.0, 5.0]), None),
        (([1.0, 2.0], [3.0, 5.0]), 0),
        (([1.0, 2.0, 3.0, 4.0], [5.0, 6.0]), 0),
        (([1.0, 2.0], []), 0),
        (([1, 2], [4, 6]), None),
        (([1, 2], [4, 6]), 0),
        (([[1.0, 2.0]], [[3.0, 5.0]]), 1),
        (([[1.0, 2.0]], [[3.0, 5.0]]), (0, 1)),
    ],
)
def test_reduce_is_native(two, native, op, values, axis):
    dtype = "int32" if isinstance(values[0][0], int) else "float32"
    values = [tf.constant(value, dtype) for value in values]
    expected = native.reduce(op, native_per_replica(native, *values), axis=axis)
    result = two.reduce(op, per_replica(*values), axis=axis)
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected)


def test_reduce_after_run(two):
    assert jobs.reduce_after_run(two) == jobs.REDUCED_AFTER_RUN


def test_reduce_sparse(two, native):
    slices = [
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([i]), tf.constant([3, 2]))
        for i in range(2)
    ]
    result = two.reduce("SUM", per_replica(*slices))
    assert isinstance(result, tf.IndexedSlices)
    expected = native.reduce("SUM", native_per_replica(native, *slices), axis=None)
    np.testing.assert_array_equal(
        tf.convert_to_tensor(result), tf.convert_to_tensor(expected)
    )


def test_reduce_refuses_before_a_collective(two):
    uneven = per_replica(tf.ones(4), tf.ones(2))
    with pytest.raises(ValueError, match=r"\(4,\), \(2,\)"):
        two.reduce("SUM", uneven)
    with pytest.raises(ValueError, match="axis"):
        two.reduce("SUM", per_replica(1.0, 3.0), axis=0)
    with pytest.raises(ValueError, match="numbers"):
        two.reduce("SUM", per_replica("a", "b"))
    with pytest.raises(ValueError, match="same shape"):
        two.run(lambda x: ks.get_replica_context().all_reduce("SUM", x), args=(uneven,))
    total = two.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert [float(x) for x in two.experimental_local_results(total)] == [4.0, 4.0]


def test_gather():
    assert concat_values([tf.ones((2, 1)), tf.zeros((2, 2))], 1).shape == (2, 3)
    with pytest.raises(ValueError, match="scalars cannot"):
        concat_values([tf.constant(1.0), tf.constant(2.0)], 0)
    with pytest.raises(ValueError, match="all other dimensions"):
        concat_values([tf.ones((2, 1)), tf.zeros((2, 2))], 0)


def test_native_variables_are_assigned_and_updated_as_natively(two, native):
    def results(strategy, library):
        make = functools.partial(tf.Variable, aggregation=tf.VariableAggregation.MEAN)
        with strategy.scope():
            mean, table = make(1.0), make(tf.zeros([3]))
            total = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        found = []

        def subtract(strategy, x):
            strategy.extended.update(mean, lambda c, x: c.assign_sub(x), (x,))

        def step():
            context = library.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, "float32")
            context.merge_call(subtract, (4.0,))
            context.merge_call(subtract, (tf.constant(0.5),))
            table.scatter_add(tf.IndexedSlices(number[None] + 1, tf.constant([1])))
            total.assign_add(number + 1)
            return mean.assign_add(number)

        for value in (strategy.run(step), strategy.run(tf.function(step))):
            found += strategy.experimental_local_results(value)
        found += [mean, table, tf.convert_to_tensor(total)]
        update = strategy.extended.update
        grouped = update(mean, lambda c, x: c.assign(x + 2), (total,))
        found += [*strategy.experimental_local_results(grouped), mean]
        found += update(table, lambda c: c.assign_add([1.0, 0, 0]), group=False)
        sums = strategy.extended.reduce_to(
            library.ReduceOp.SUM, strategy.run(lambda: tf.ones([])), mean
        )
        update(mean, lambda c, x: c.assign(x), (sums,))
        found += [mean, strategy.extended.variable_created_in_scope(mean)]
        return [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in found]

    for ours, theirs in zip(
        results(two, ks), results(native, tf.distribute), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def locally(strategy, value):
    """The value of each replica, with lists in the place of tensors."""
    return tf.nest.map_structure(
        lambda x: x.numpy().tolist(), strategy.experimental_local_results(value)
    )


# What a mirrored `m` and an on-read `r` are where tf.distribute takes a variable.
NATIVE_VALUES = {
    "mean": lambda s, lib, m, r: [s.reduce("MEAN", v, axis=None) for v in (m, r)],
    "sum": lambda s, lib, m, r: s.reduce("SUM", r, axis=None),
    "over rows": lambda s, lib, m, r: [
        s.reduce(op, v, axis=0) for op in ("SUM", "MEAN") for v in (m, r)
    ],
    "gather": lambda s, lib, m, r: (s.gather(m, axis=0), s.gather(r, axis=0)),
    "local": lambda s, lib, m, r: {"m": m, "r": [r]},
    "argument": lambda s, lib, m, r: s.run(lambda x, y: x + y, (m,), {"y": r}),
    "all_reduce": lambda s, lib, m, r: s.run(
        lambda: lib.get_replica_context().all_reduce("SUM", {"m": m, "r": r})
    ),
    "all_gather": lambda s, lib, m, r: s.run(
        lambda: lib.get_replica_context().all_gather(r, axis=0)
    ),
    "reduce_to": lambda s, lib, m, r: s.extended.reduce_to("SUM", r, destinations=m),
    "batch": lambda s, lib, m, r: s.extended.batch_reduce_to(
        "MEAN", [(r, m), (s.run(tf.ones, ([],)), r)]
    ),
    "reduction to": lambda s, lib, m, r: lib.ReductionToOneDevice().reduce(
        lib.ReduceOp.SUM, s.run(tf.ones, ([],)), destinations=m
    ),
    "broadcast": lambda s, lib, m, r: lib.ReductionToOneDevice().broadcast(
        tf.constant(1.0), destinations=m
    ),
    "update": lambda s, lib, m, r: s.extended.update(
        m, lambda c, x: c.assign_add(x), (m,)
    ),
    "update on read": lambda s, lib, m, r: s.extended.update(
        r, lambda c, x: c.assign(x), (tf.constant([4.0]),), group=False
    ),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("case", NATIVE_VALUES)
def test_native_variables_are_values_as_natively(case, replicas, two, native):
    if replicas == 1:
        two, native = (
            ks.OneDeviceStrategy("cpu:1"),
            tf.distribute.OneDeviceStrategy("CPU:1"),
        )

    def result(strategy, library):
        def assign():
            number = library.get_replica_context().replica_id_in_sync_group
            on_read.assign([tf.cast(number, "float32") + 1.0])

        with strategy.scope():
            mirrored = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN)
            on_read = tf.Variable(
                [0.0],
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        strategy.run(assign)
        value = NATIVE_VALUES[case](strategy, library, mirrored, on_read)
        return locally(strategy, value), locally(strategy, [mirrored, on_read])

    assert result(two, ks) == result(native, tf.distribute)


def test_first_replica_assigns_native_variable(two, native):
    def values(strategy, library):
        with strategy.scope():
            variable = tf.Variable(
                [0.0, 0.0], aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

        @tf.function
        def step():
            number = library.get_replica_context().replica_id_in_sync_group
            rows = tf.cast(number, "float32")[None] + 1.0
            variable.assign_add([1.0, 1.0] + rows)
            return variable.scatter_max(tf.IndexedSlices(rows * 9.0, tf.constant([1])))

        return locally(strategy, strategy.run(step)), locally(strategy, variable)

    assert values(two, ks) == values(native, tf.distribute)


def test_datasets_after_one_for_each_replica(two):
    dataset = tf.data.Dataset.range(6).batch(4)
    mode = ks.InputReplicationMode.PER_REPLICA
    options = ks.InputOptions(
        experimental_fetch_to_device=False, experimental_replication_mode=mode
    )
    each = two.distribute_datasets_from_function(lambda context: dataset, options)
    assert locally(two, next(iter(each))) == ([0, 1, 2, 3], [0, 1, 2, 3])
    split = two.experimental_distribute_dataset(dataset)
    assert [locally(two, x) for x in split] == [([0, 1], [2, 3]), ([4], [5])]


def test_update_refuses_native_variables_of_others(two, native):
    with native.scope():
        variable = tf.Variable(1.0)
    for foreign in (variable, tf.Variable(1.0)):
        assert not two.extended.variable_created_in_scope(foreign)
        with pytest.raises(ValueError, match="`var` of `update`.*created in the scope"):
            two.extended.update(foreign, lambda c: c.assign(2.0))


def test_run_takes_control_flow_over_tensors(two):
    def double_large(x):
        if tf.reduce_sum(x) > 3.0:
            return x * 2
        return x

    class Steps:
        def repeat(self, x):
            for _ in tf.range(2):
                x = double_large(x)
            while tf.reduce_max(x) > 10.0:
                x -= 1.0
            return x

    x = per_replica(tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0]))
    steps = Steps()
    for fn, right in (
        (double_large, [[1, 2], [6, 12]]),
        (tf.function(double_large), [[1, 2], [6, 12]]),
        (functools.partial(double_large), [[1, 2], [6, 12]]),
        (steps.repeat, [[1, 2], [-2, 10]]),
    ):
        for _ in range(2):
            found = two.experimental_local_results(two.run(fn, args=(x,)))
            assert [part.numpy().tolist() for part in found] == right
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        two.run(lambda x: [part for part in x if part > 0], args=(x,))


def test_numbers_of_a_tf_function_are_tensors(two, native):
    def results(strategy, library):
        @tf.function
        def step():
            return 5.0, library.get_replica_context().replica_id_in_sync_group

        constant, number = strategy.run(step)
        numbers = strategy.experimental_local_results(number)
        return [constant.numpy(), *(x.numpy() for x in numbers)]

    assert results(two, ks) == results(native, tf.distribute)


def test_local_results_in_a_tf_function_are_converted(two, caplog):
    with two.scope():
        variable = tf.Variable(1.0)

    @tf.function
    def read():
        value = two.run(lambda: tf.constant(2.0))
        local = two.experimental_local_results
        return local(value), local(variable)

    values, variables = read()
    assert [x.numpy() for x in (*values, *variables)] == [2.0, 2.0, 1.0, 1.0]
    assert "AutoGraph could not" not in caplog.text


def test_nest_does_not_take_values_apart(two, native):
    def results(strategy, per):
        names = {"MEAN": None, "SUM": 0}

        def use(value):
            reduced = [strategy.reduce(op, value, axis=names[op]) for op in names]
            local = strategy.experimental_local_results(value)
            return [x.numpy().tolist() for x in (*reduced, *local)]

        found = tf.nest.map_structure(lambda value: [use(value)], per)
        gathered = tf.nest.map_structure(lambda x: strategy.gather(x, axis=0), per)
        components = tf.nest.flatten(per, expand_composites=True)
        return found, gathered["loss"].numpy().tolist(), len(components)

    def step(x):
        return {"loss": x * 2.0}

    values = tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0])
    per = two.run(step, (per_replica(*values),))
    oracle = native.run(step, (native_per_replica(native, *values),))
    assert results(two, per) == results(native, oracle)

    @tf.function
    def doubled(structure):
        double = lambda x: two.run(step, (x,))["loss"]  # noqa: E731
        return tf.nest.map_structure(double, structure)

    again = doubled(per)["loss"]
    assert isinstance(again, ks.PerReplica)
    assert [x.numpy().tolist() for x in again.values] == [[4.0, 8.0], [12.0, 24.0]]


# --- run


def test_run_compiles_once_per_shape(two):
    traced = []

    def step(x):
        traced.append(x)
        return x * 2, "constant", None

    for _ in range(100):
        doubled, constant, nothing = two.run(
            step, args=(per_replica(tf.ones(3), tf.ones(2)),)
        )
    assert len(traced) == 2  # once on each replica
    assert constant == "constant" and nothing is None
    assert [len(x) for x in two.experimental_local_results(doubled)] == [3, 2]


def test_run_evicts_functions(two):
    def run_once():
        fn = lambda x: x * 2  # noqa: E731
        two.run(fn, args=(tf.ones(2),))
        return weakref.ref(fn)

    references = [run_once() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_replica_id_is_an_integer(strategy):
    def fn():
        context = ks.get_replica_context()
        assert isinstance(context.replica_id_in_sync_group, int)
        return context.replica_id_in_sync_group, context.devices[0]

    ids, devices = strategy.run(fn)
    n = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(ids) == tuple(range(n))
    assert strategy.experimental_local_results(devices) == tuple(
        f"cpu:{i}" for i in range(n)
    )


def test_run_in_tf_function_passes_distributed_values(strategy):
    n = strategy.num_replicas_in_sync
    x = per_replica(*[tf.ones(i + 1) for i in range(n)])

    @tf.function
    def double(x):
        doubled = strategy.run(lambda part: part * 2.0, args=(x,))
        return doubled, strategy.reduce("SUM", doubled, axis=0)

    for _ in range(2):
        doubled, total = double(x)
    assert isinstance(doubled, ks.PerReplica)
    assert [len(part) for part in doubled.values] == list(range(1, n + 1))
    assert float(total) == n * (n + 1)


def test_autograph_works_in_users_tf_function(two):
    def absolute(x):
        if tf.reduce_sum(x) < 0.0:
            x = -x
        return x

    @tf.function
    def run(x):
        return two.run(absolute, args=(x,))

    result = run(per_replica(tf.constant([-1.0]), tf.constant([2.0])))
    assert [x.numpy().tolist() for x in result.values] == [[1.0], [2.0]]


def test_run_accepts_tf_function(two):
    @tf.function
    def fn(x):
        return ks.get_replica_context().all_reduce("SUM", x)

    total = two.run(fn, args=(per_replica(tf.constant(1.0), tf.constant(2.0)),))
    assert [float(x) for x in total.values] == [3.0, 3.0]


def test_collectives_of_workers(strategy):
    n = strategy.num_replicas_in_sync

    def fn():
        context = ks.get_replica_context()
        replica = context.replica_id_in_sync_group
        rows = tf.fill((replica + 1,), float(replica))
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("SUM", x), args=(tf.constant(2.0),)
        )
        each = context.merge_call(lambda strategy, x: x, args=(tf.constant(replica),))
        mean = context.all_reduce("MEAN", {"a": tf.constant(float(replica))})
        return context.all_gather(rows, 0), merged, each, mean["a"]

    gathered, merged, each, mean = strategy.run(fn)
    rows = [float(i) for i in range(n) for _ in range(i + 1)]
    for replica in range(n):
        assert gathered.values[replica].numpy().tolist() == rows
        assert float(merged.values[replica]) == 2.0 * n
        assert int(each.values[replica]) == replica
        assert float(mean.values[replica]) == (n - 1) / 2


def test_collectives_are_differentiable(strategy):
    n = strategy.num_replicas_in_sync

    def fn():
        context = ks.get_replica_context()
        scale = float(context.replica_id_in_sync_group + 1)
        x = tf.fill((context.replica_id_in_sync_group + 1,), scale)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            total = context.all_reduce("SUM", tf.reduce_sum(x)) * scale
            joined = tf.reduce_sum(context.all_gather(x, 0)) * scale
        return tape.gradient(total, x), tape.gradient(joined, x)

    of_sum, of_gather = strategy.run(fn)
    expected = n * (n + 1) / 2
    for gradient in (*of_sum.values, *of_gather.values):
        np.testing.assert_allclose(gradient, np.full(gradient.shape, expected))


def test_exception_rolls_back_state(two):
    with two.scope():
        v = keras.Variable(1.0)

    def fn():
        v.assign(2.0)
        if ks.get_replica_context().replica_id_in_sync_group == 1:
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        two.run(fn)
    assert float(v) == 1.0
    assert not ks.has_strategy() and not tf.distribute.has_strategy()
    assert [float(x) for x in two.run(lambda: v * 3.0).values] == [3.0, 3.0]


def test_runtime_error_reports_partial_state(two):
    def fn(x):
        tf.debugging.assert_positive(x)
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        two.run(fn, args=(per_replica(tf.constant(1.0), tf.constant(-1.0)),))
    assert "stays assigned" in error.value.__notes__[0]
    assert not tf.distribute.has_strategy()


@pytest.mark.needs_patch("Layer._maybe_build", backend="tensorflow")
def test_run_builds_layers_lazily(two):
    with two.scope():
        layer = keras.layers.Dense(2)
        optimizer = keras.optimizers.Adam(0.1)
        metric = keras.metrics.Mean()

    def step(x):
        def loss_of(x):
            return keras.ops.mean(layer(x) ** 2)

        layer(x)
        grad = ks.value_and_grad(loss_of, layer.trainable_variables)
        loss, gradients = grad(x)
        optimizer.apply(gradients, layer.trainable_variables)
        metric.update_state(loss)
        return loss, keras.random.uniform((2,))

    for _ in range(2):
        _, noise = two.run(step, args=(per_replica(tf.ones((3, 4)), tf.ones((2, 4))),))
    assert len(layer.trainable_variables) == 2
    for variable in [*layer.variables, *optimizer.variables]:
        first, second = two.experimental_local_results(variable)
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(*[x.numpy() for x in noise.values])
    assert int(optimizer.iterations) == 2


def test_branch_taken_by_one_replica(two):
    """Nothing is compiled, so the replicas ask one after the other."""
    with two.scope():
        layer, sgd = keras.layers.Dense(2), keras.optimizers.SGD()

    def step(x):
        if not layer.built:
            layer(x)
            return x
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        gradients = tape.gradient(loss, layer.trainable_variables)
        sgd.apply(gradients, layer.trainable_variables)
        return x

    with pytest.raises(RuntimeError) as caught:
        two.run(step, (tf.ones((4, 3)),), options=ks.RunOptions(compile=False))
    assert "must take the same branches" in caught.value.__notes__[-1]


class Skipping(keras.Model):
    """Applies gradients in each second step, in a branch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.steps.assign_add(1)
        apply = self.optimizer.apply
        tf.cond(self.steps % 2 == 1, lambda: apply(gradients, variables), lambda: None)
        return {"loss": loss}


def skipping():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    model = Skipping(inputs, keras.layers.Dense(1)(inputs))
    model.steps = keras.Variable(0, dtype="int32", trainable=False)
    model.compile(keras.optimizers.Adam(0.1))
    model.optimizer.build(model.trainable_variables)
    return model


def test_apply_in_branch(two):
    x = np.random.RandomState(0).randn(13, 4).astype("float32")
    weights = []
    for scope in (contextlib.nullcontext(), two.scope()):
        with scope:
            model = skipping()
        before = model.get_weights()
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) == 4
        weights.append(model.get_weights())
    assert all(np.any(a != b) for a, b in zip(before, weights[1], strict=True))
    for one, many in zip(*weights, strict=True):
        np.testing.assert_allclose(one, many, atol=2e-5)


def weight_and_optimizer(strategy):
    with strategy.scope():
        weight = keras.Variable(1.0)
        sgd = keras.optimizers.SGD(1.0)
        sgd.build([weight])
    return weight, sgd


def test_apply_in_branch_of_autograph(two):
    weight, sgd = weight_and_optimizer(two)

    def step(applies):
        gradient = tf.ones(())
        if applies:
            sgd.apply([gradient], [weight])

    @tf.function
    def program(applies):
        two.run(step, (applies,))

    program(tf.constant(True))
    program(tf.constant(False))
    assert float(weight) == -1.0  # the sum of two replicas' gradients


@pytest.mark.needs_patch("tensorflow.python.ops.cond_v2.cond_v2", backend="tensorflow")
def test_apply_in_branch_of_one_replica_is_refused(two):
    weight, sgd = weight_and_optimizer(two)

    def step(applies):
        gradient = tf.ones(())
        tf.cond(applies, lambda: sgd.apply([gradient], [weight]), lambda: None)

    two.run(step, (per_replica(tf.constant(True), tf.constant(True)),))
    assert float(weight) == -1.0
    with pytest.raises(
        ValueError, match=r"not equal on all replicas.*test_tensorflow.py:\d"
    ):
        two.run(step, (per_replica(tf.constant(True), tf.constant(False)),))
    assert float(weight) == -1.0


def test_gradients_of_branch_are_refused(two):
    weight, sgd = weight_and_optimizer(two)

    def branch(x):
        tf.cond(x > 0, lambda: sgd.apply([x * 2], [weight]), lambda: None)

    def loop(x):
        def body(x):
            sgd.apply([x], [weight])
            return (x * 2,)

        tf.while_loop(lambda x: x < 3, body, (x,))

    for step in (branch, loop):
        with pytest.raises(
            RuntimeError, match="Compute the gradients and the condition"
        ):
            two.run(step, (per_replica(tf.ones(()), tf.ones(())),))
    assert float(weight) == 1.0


def test_tape_in_cross_replica_context_is_refused(two):
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(tf.ones((4, 3))))
        with pytest.raises(RuntimeError, match="`strategy.run` calls"):
            tape.gradient(value, model.trainable_variables)


def test_apply_in_cross_replica_context(two):
    with two.scope():
        v = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)
        with pytest.raises(RuntimeError, match="strategy.run"):
            optimizer.apply([tf.constant(1.0)], [v])
        with pytest.raises(RuntimeError, match="strategy.run"):
            optimizer.apply_gradients([(tf.constant(1.0), v)])
    optimizer = keras.optimizers.SGD(0.1)
    plain = keras.Variable(1.0)
    optimizer.apply([tf.constant(1.0)], [plain])
    assert float(plain) == pytest.approx(0.9)


def test_value_and_grad_watches_untrainable_variables(two):
    with two.scope():
        v = keras.Variable(3.0, trainable=False)
    compute = ks.value_and_grad(lambda x: (x * v * v, x), [v], has_aux=True)
    (value, aux), (gradient,) = compute(2.0)
    assert (float(value), aux, float(gradient)) == (18.0, 2.0, 12.0)
    (value, _), (gradient,) = two.run(compute, args=(tf.constant(2.0),))
    assert [float(x) for x in gradient.values] == [12.0, 12.0]
    with pytest.raises(ValueError, match="scalar"):
        ks.value_and_grad(lambda x: x * v, [v])(tf.ones(2))


# --- variables


def test_adopted_variables_keep_values_and_slots(two):
    v = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.apply([tf.ones(2)], [v])
    before = v.numpy()
    with two.scope():
        adopt(two, [v, *optimizer.variables])
    np.testing.assert_array_equal(v.numpy(), before)
    two.run(lambda: optimizer.apply([tf.ones(2)], [v]))
    # Momentum 0.9 * -0.1 - 0.1 * (sum of the gradients, 2)
    np.testing.assert_allclose(v.numpy(), before - 0.29, rtol=1e-6)
    first, second = two.experimental_local_results(v)
    np.testing.assert_array_equal(first, second)


# --- fit


def test_batch_normalization_statistics_equal_on_all_replicas(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    x = np.random.RandomState(0).randn(9, 3).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    for variable in model.variables:
        parts = strategy.experimental_local_results(variable)
        for part in parts:
            assert np.isfinite(part).all()
            np.testing.assert_array_equal(part, parts[0])


def test_dropout_masks_differ_and_seed_state_does_not(two):
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5, seed=1)

        def call(self, x):
            return self.dropout(x, training=True)

    with two.scope():
        model = keras.Sequential([keras.Input((64,)), Noise()])
    rows = model.predict(np.ones((2, 64), "float32"), verbose=0)
    assert not np.array_equal(rows[0], rows[1])
    states = [v for v in model.variables if "seed" in v.path]
    assert states
    for state in states:
        first, second = two.experimental_local_results(state)
        np.testing.assert_array_equal(first, second)


def test_predict_builds_model(two):
    with two.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
    x = np.random.RandomState(0).randn(5, 3).astype("float32")
    predicted = model.predict(x, batch_size=2, verbose=0)
    np.testing.assert_allclose(predicted, x @ model.layers[0].kernel, rtol=1e-5)
    assert len(two.experimental_local_results(model.layers[0].kernel)) == 2


def test_empty_replica_does_not_abort(strategy):
    """oneDNN's convolution and pooling do, when they get no row at all."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.RandomState(0).randn(9, 6, 6, 1).astype("float32")
    model.fit(x, x[:, 0, :2, 0], batch_size=4, verbose=0)
    predicted = model.predict(x, batch_size=4, verbose=0)
    assert predicted.shape == (9, 2)
    np.testing.assert_allclose(predicted, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_jit_compile_warns(method, two, caplog):
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    targets = () if method == "predict" else (np.ones((4, 1)),)
    getattr(model, method)(np.ones((4, 3)), *targets, verbose=0)
    assert "jit_compile=True is not used" in caplog.text


def test_fit_works_after_exception(two):
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises((ValueError, RuntimeError)):
        model.fit(np.ones((4, 5)), np.ones((4, 1)), verbose=0)
    assert not ks.has_strategy() and not tf.distribute.has_strategy()
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


# --- a native strategy of the user's own


def test_users_native_strategy_is_unchanged(two, native):
    """After our hooks are installed, Keras under native tf.distribute is stock."""
    x = np.random.RandomState(0).randn(8, 3).astype("float32")

    def weights(scope):
        keras.utils.set_random_seed(0)
        with scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), "mse")
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        assert model.distribute_strategy is native
        assert model._distribute_strategy is native
        return model.get_weights()

    native_weights = weights(native.scope)
    # Stock Keras clips before it sums: two replicas move farther than one would.
    step = np.abs(native_weights[1])
    assert step[0] > 0.1 * 0.01 * 1.5
    assert native.run(ks.in_cross_replica_context) is False
    assert ks.get_strategy().num_replicas_in_sync == 1


def test_gather_ragged_rows(two):
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]])
    parts = [rows[:1], rows[1:]]
    x = two.experimental_distribute_values_from_function(
        lambda c: parts[c.replica_id_in_sync_group]
    )
    gathered = two.run(
        lambda x: ks.get_replica_context()._replica.all_gather(x, 0), args=(x,)
    )
    for value in two.experimental_local_results(gathered):
        assert value.to_list() == rows.to_list()


@pytest.mark.full(keep=1)
def test_loss_of_ragged_global_batch(two):
    """Its gradient passes through the gathering: d sum(w x) / d w = sum(x)."""
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x * self.w

    def fitted(scope):
        with scope:
            model = keras.Sequential([Scaled()])
            model.compile(
                keras.optimizers.SGD(0.1),
                lambda y, predicted: tf.reduce_sum(predicted),
            )
        model.fit(rows, rows, batch_size=3, verbose=0)
        return float(model.trainable_variables[0])

    found = fitted(two.scope())
    assert found == pytest.approx(fitted(contextlib.nullcontext()), abs=1e-6)
    assert found == pytest.approx(0.0, abs=1e-6)


def test_native_checkpoint_of_sharded_state(tmp_path):
    def trained(replicas):
        devices = [f"cpu:{i}" for i in range(replicas)]
        strategy = ks.MirroredStrategy(devices, shard="optimizer")
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
            model.compile("adam", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 5)), batch_size=4, verbose=0)
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    (one, written), (other, read) = trained(2), trained(3)
    one.optimizer.variables[-1].assign(np.arange(5.0))
    path = written.write(str(tmp_path / "checkpoint"))
    read.read(path).assert_existing_objects_matched()
    for a, b in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
