"""What is JAX's alone: placement, donation, tracing."""

import collections
import contextlib
import copy
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX adapter", allow_module_level=True)

import jax

from benchmarks.memory import collectives
from keras_strategy.backends.jax import patches_data
from keras_strategy.backends.jax.variables import assemble_locally
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.values import PerReplica
from tests.equality.compare import largest, scope

X = np.random.default_rng(0).normal(size=(21, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(21, 1)).astype("float32")


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def local(strategy, value):
    return [np.array(v).tolist() for v in strategy.experimental_local_results(value)]


def small_model(optimizer="sgd"):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, activation="relu"), layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


# --- fit


def test_batch_is_split_where_divisible(two):
    distribution = two.extended.group.distribution
    assert distribution.get_data_layout((8, 3)).axes == ("replica", None)
    assert distribution.get_data_layout((7, 3)).axes == (None, None)
    assert distribution.get_data_layout(()).axes == ()


def test_steps_dimension_leaves_batch_dimension_split(two):
    distribution = two.extended.group.distribution
    for rows, axis in ((8, "replica"), (7, None)):
        placed = distribution.place_batch(np.ones((3, rows, 2)), steps_in_front=True)
        spec = jax.sharding.PartitionSpec(None, axis)
        wanted = jax.sharding.NamedSharding(distribution.mesh, spec)
        assert placed.sharding.is_equivalent_to(wanted, 3)


@pytest.mark.needs_patch("JAXEpochIterator._get_distributed_iterator", backend="jax")
@pytest.mark.parametrize(("batch_size", "warned"), [(8, False), (7, True)])
def test_indivisible_batches_warn(batch_size, warned, two, caplog):
    with two.scope():
        model = small_model()
    with caplog.at_level("WARNING", "keras_strategy"):
        model.fit(X, Y, batch_size=batch_size, epochs=2, verbose=0)
    messages = [r.message for r in caplog.records if "cannot be split" in r.message]
    assert len(messages) == warned


def test_prefetch_moves_one_batch_ahead(two, monkeypatch):
    def weights(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = small_model()
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    expected = weights(None)
    # That it is none is all that Keras and our hooks ask for.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert largest(expected, weights(two)) < 2e-5


def test_prefetch_keeps_order_and_depth():
    read = []
    ahead = patches_data._prefetch_one(read.append(i) or i for i in range(3))
    assert (next(ahead), read) == (0, [0, 1])
    assert (list(ahead), read) == ([1, 2], [0, 1, 2])
    assert list(patches_data._prefetch_one(iter(()))) == []


def test_scope_resets_keras_distribution(two, mirrored):
    before = keras.distribution.distribution()
    with pytest.raises(KeyError), two.scope():
        raise KeyError
    with two.scope():
        model = small_model()

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError

    with pytest.raises(KeyError):
        model.fit(X, Y, verbose=0, callbacks=[Fails()])
    assert keras.distribution.distribution() is before
    model.fit(X, Y, batch_size=8, verbose=0)
    with mirrored(3).scope():
        other = small_model()
    other.fit(X, Y, batch_size=8, verbose=0)
    assert keras.distribution.distribution() is before


def test_predict_on_batch_is_distributed(two, monkeypatch):
    with two.scope():
        model = small_model()
    model.predict_on_batch(X[:8])
    seen = []
    function = model.predict_function

    def spy(state, iterator):
        (batch,) = next(iterator)
        seen.append(batch.sharding)
        return function(state, iter([(batch,)]))

    monkeypatch.setattr(model, "predict_function", spy)
    result = model.predict_on_batch(X[:8])
    assert isinstance(result, np.ndarray) and result.shape == (8, 1)
    assert seen[0].spec[0] == "replica"


@pytest.mark.needs_patch("Model.__call__", backend="jax")
def test_model_call_accepts_array_of_another_device(two, mirrored):
    with two.scope():
        model = small_model()
    far = jax.device_put(X, jax.devices()[3])
    expected = np.array(model(X))
    np.testing.assert_allclose(np.array(model(far)), expected, atol=1e-6)
    with two.scope():
        np.testing.assert_allclose(np.array(model(far)), expected, atol=1e-6)
    with mirrored(3).scope():
        other = small_model()
    assert other(layers.Dense(6)(model(X))).shape == (21, 1)


@pytest.mark.needs_patch("Model._get_jax_state", backend="jax")
def test_ema_shares_no_array_with_weights(two):
    with two.scope():
        model = small_model(keras.optimizers.SGD(0.1, use_ema=True))
    for _ in range(2):
        model.fit(X, Y, batch_size=8, verbose=0)
        model.predict(X, verbose=0)
        model.train_on_batch(X[:5], Y[:5])


@pytest.mark.needs_patch(
    "backends.jax.patches keras.src.random.seed_generator.global_seed_generator",
    backend="jax",
)
def test_global_seed_generator_is_not_mirrored(two):
    with two.scope():
        keras.random.normal((2,))
    assert not keras.random.normal((2,)).committed
    first = two.run(lambda: keras.random.normal((2,)))
    second = two.run(lambda: keras.random.normal((2,)))
    drawn = local(two, first) + local(two, second)
    assert len({tuple(numbers) for numbers in drawn}) == 4
    assert not keras.random.normal((2,)).committed


def test_logical_devices_cannot_change_after_use(two):
    ks.config.set_logical_devices("cpu", 4)
    with pytest.raises(RuntimeError, match="split into 3 logical devices"):
        ks.config.set_logical_devices("cpu", 3)


# --- run


def test_run_compiles_function_once(two):
    with two.scope():
        v = keras.Variable(1.0)
    traces = []

    def step(x):
        traces.append(1)
        v.assign_add(keras.ops.sum(x) * 0.0 + 1.0)
        return x + v

    for i in range(20):
        two.run(step, args=(per_replica(two, *[np.full(2, i, "float32")] * 2),))
    # The first trace finds the variable, the second one threads it.
    assert len(traces) == 2
    assert float(v.value) == 21.0


def test_retracing_finds_scope(two):
    """JAX does where its settings changed, and the function may do something else."""
    with two.scope():
        first, other = (keras.Variable(1.0, aggregation="sum") for _ in range(2))
    seen = []

    def step(x):
        seen.append((ks.get_strategy(), keras.distribution.distribution() is not None))
        precise = jax.config.jax_default_matmul_precision == "float32"
        (other if precise else first).assign_add(x)
        return ("precise", x) if precise else "as usual"

    for precision in (None, None, "float32", "float32", None):
        with jax.default_matmul_precision(precision):
            result = two.run(step, (np.float32(1),))
            assert (result == "as usual") is (precision is None)
    assert [float(v.value) for v in (first, other)] == [7.0, 5.0]
    assert set(seen) == {(two, True)}


def test_retracing_error_is_raised(two):
    """It leaves all as it was, and what the step made by then can be assigned."""
    with two.scope():
        v = keras.Variable(1.0, aggregation="sum")
    made = keras.layers.Dense(1)

    def step(x):
        v.assign_add(x)
        if jax.config.jax_default_matmul_precision == "float32":
            made.build((None, 2))
            raise ValueError("no")

    two.run(step, (np.float32(1),))
    two.run(step, (np.float32(1),))
    with jax.default_matmul_precision("float32"), pytest.raises(ValueError, match="no"):
        two.run(step, (np.float32(1),))
    assert float(v.value) == 5.0
    made.kernel.assign(np.ones((2, 1)))
    total = two.run(lambda: keras.ops.sum(made.kernel))
    assert float(total.values[0]) == 2.0


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_run_inside_fit_epoch_is_refused(known, compiled, two):
    """Keras has taken the values out of the variables."""
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 3), "float32")
    options = ks.RunOptions(compile=compiled)

    def step(x):
        return keras.ops.sum(model(x))

    def run(*_, **__):
        return two.run(step, (x,), options=options)

    if known:
        run()
    told = keras.callbacks.LambdaCallback(on_train_batch_end=run)
    with pytest.raises(RuntimeError, match="Keras keeps the values"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[told])
    assert float(run().values[0]) == float(keras.ops.sum(model(x)))


def test_donation_skips_referenced_arrays(two):
    with two.scope():
        a = keras.Variable(np.ones(3, "float32"))
        b = keras.Variable(np.zeros(3, "float32"))
    b.assign(a.value)  # now they share one array
    held, seen = a.value, np.asarray(a.value)

    def step():
        a.assign_add(np.ones(3, "float32"))
        b.assign_add(np.full(3, 2.0, "float32"))

    for _ in range(3):
        two.run(step)
    assert a.numpy().tolist() == [4.0] * 3
    assert b.numpy().tolist() == [7.0] * 3
    assert np.array(held).tolist() == seen.tolist() == [1.0] * 3


def test_step_reuses_donated_memory(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))

    def step():
        v.assign_add(np.ones(3, "float32"))

    two.run(step)
    for _ in range(3):
        # Not by `v.value`: what was read is not overwritten.
        part = stored_value(v).addressable_shards[0].data
        two.run(step)
        assert part.is_deleted()
    held = v.value
    two.run(step)
    assert not held.is_deleted()
    assert (held + 1).tolist() == v.numpy().tolist() == [5.0] * 3


SHARING = {
    "value": lambda two, v: v.value,
    "components": lambda two, v: PerReplica(two.experimental_local_results(v)),
    "result": lambda two, v: two.run(lambda: v.value),
    "assigned": lambda two, v: two.run(lambda: v.assign(v.value * 1.0)),
    "not compiled": lambda two, v: two.run(
        lambda: v.value, options=ks.RunOptions(compile=False)
    ),
    "copy": lambda two, v: two.extended.reduce_to("mean", v.value, "cpu:1"),
    "mirrored": lambda two, v: two.extended.reduce_to("mean", v.value, v),
    "moved": lambda two, v: jax.device_put(v.value, jax.devices()[1]),
    "shard": lambda two, v: v.value.addressable_shards[0].data,
    "whole slice": lambda two, v: v[...],
    "numpy": lambda two, v: np.asarray(v),
    "tensor": lambda two, v: keras.ops.convert_to_tensor(v),
    "read in a gradient": lambda two, v: ks.value_and_grad(
        lambda: (keras.ops.sum(v), v.value), [v], has_aux=True
    )()[0][1],
}


@pytest.mark.parametrize("kind", SHARING)
def test_view_of_variable_survives_donation(two, kind):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))

    def step():
        v.assign_add(np.ones(3, "float32"))

    two.run(step)
    shared = SHARING[kind](two, v)
    for _ in range(2):
        two.run(step)
    for part in two.experimental_local_results(shared):
        assert part.tolist() == [1.0] * 3
    assert v.numpy().tolist() == [3.0] * 3


def test_variables_sharing_an_array_keep_values(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))

    def step():
        v.assign_add(np.ones(3, "float32"))

    two.run(step)
    twin = copy.copy(v)
    for _ in range(2):
        two.run(step)
    assert twin.numpy().tolist() == [1.0] * 3

    def both():
        step()
        twin.assign_add(np.full(3, 2.0, "float32"))

    two.run(both)
    third = copy.copy(v)

    def all_three():
        both()
        third.assign_add(np.ones(3, "float32"))

    for _ in range(2):
        two.run(all_three)
    assert v.numpy().tolist() == [6.0] * 3
    assert twin.numpy().tolist() == [7.0] * 3
    assert third.numpy().tolist() == [6.0] * 3


def test_one_tensor_can_be_assigned_to_two_variables(two):
    with two.scope():
        a = keras.Variable(np.zeros(3, "float32"))
        b = keras.Variable(np.zeros(3, "float32"))
    given = jax.numpy.full(3, 2.0)

    def assign(x):
        a.assign(x)
        b.assign(x)

    def step():
        a.assign_add(np.ones(3, "float32"))
        b.assign_add(np.full(3, 2.0, "float32"))

    for _ in range(2):
        two.run(assign, args=(given,))
        two.run(step)
    assert a.numpy().tolist() == [3.0] * 3
    assert b.numpy().tolist() == [4.0] * 3
    assert given.tolist() == [2.0] * 3


def test_step_donates_assigned_unread_variables(two):
    with two.scope():
        model = small_model(keras.optimizers.Adam())
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
    rows = per_replica(two, X[:4], X[4:8])

    def step(x):
        _, gradients = ks.value_and_grad(
            lambda: keras.ops.mean(model(x) ** 2), model.trainable_variables
        )()
        optimizer.apply(gradients, model.trainable_variables)

    def parts():
        return [
            stored_value(v).addressable_shards[0].data
            for v in (*model.trainable_variables, *optimizer.variables)
            if v is not optimizer._learning_rate
        ]

    two.run(step, args=(rows,))
    before = parts()
    two.run(step, args=(rows,))
    assert all(part.is_deleted() for part in before)
    held = model.trainable_variables[0].value
    before = parts()
    two.run(step, args=(rows,))
    assert [part.is_deleted() for part in before] == [False] + [True] * (
        len(before) - 1
    )
    assert np.isfinite(np.asarray(held)).all()


def test_failed_step_keeps_variables(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))

    def step(x):
        v.assign_add(np.ones(3, "float32"))
        if x.shape[0] == 2:
            raise ValueError("not such a batch")

    two.run(step, args=(np.ones(4, "float32"),))
    before = stored_value(v)
    with pytest.raises(ValueError, match="not such a batch"):
        two.run(step, args=(np.ones(2, "float32"),))
    assert stored_value(v) is before
    assert v.numpy().tolist() == [1.0] * 3
    two.run(step, args=(np.ones(4, "float32"),))
    assert v.numpy().tolist() == [2.0] * 3


def test_assigned_value_survives_donation(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))
    two.run(lambda: v.assign_add(np.ones(3, "float32")))
    given = jax.numpy.full(3, 2.0)
    v.assign(given)
    for _ in range(2):
        two.run(lambda: v.assign_add(np.ones(3, "float32")))
    assert given.tolist() == [2.0] * 3
    assert v.numpy().tolist() == [4.0] * 3


def test_value_assigned_to_another_strategy_survives_donation(two, mirrored):
    other = mirrored(3)
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))
    with other.scope():
        w = keras.Variable(np.zeros(3, "float32"))
    ones = np.ones(3, "float32")
    two.run(lambda: v.assign_add(ones))
    with other.scope():
        w.assign(v.value)
    two.run(lambda: v.assign_add(ones))
    other.run(lambda: w.assign_add(3 * ones))
    v.assign(w.value)
    other.run(lambda: w.assign_add(ones))
    assert v.numpy().tolist() == [4.0] * 3
    assert w.numpy().tolist() == [5.0] * 3


def test_variable_can_be_copied_after_step(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))
    two.run(lambda: v.assign_add(np.ones(3, "float32")))
    twin = copy.deepcopy(v)
    two.run(lambda: v.assign_add(np.ones(3, "float32")))
    two.run(lambda: twin.assign_add(np.full(3, 2.0, "float32")))
    assert v.numpy().tolist() == [2.0] * 3 and twin.numpy().tolist() == [3.0] * 3


def test_steps_run_in_two_threads(two):
    with two.scope():
        v = keras.Variable(np.zeros(3, "float32"))

    def step():
        v.assign_add(np.ones(3, "float32"))

    two.run(step)
    errors = []

    def steps():
        try:
            for _ in range(50):
                two.run(step)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert v.numpy().tolist() == [151.0] * 3


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_loss_sum_is_part_of_the_step(two, op):
    """And is what `reduce` gives of any other value."""
    with two.scope():
        v = keras.Variable(np.ones((), "float32"))
        sgd = keras.optimizers.SGD(0.0)

    def loss(x):
        return v * x

    def step(x):
        value, gradients = ks.value_and_grad(loss, [v])(x)
        sgd.apply(gradients, [v])
        return value, keras.ops.cast(value, "int32"), value[None]

    x = per_replica(two, np.float32(1.0), np.float32(4.0))
    total, integers, rows = two.run(step, args=(x,))
    assert total.total is not None and integers.total is rows.total is None
    plain = two.run(loss, args=(x,))
    assert plain.total is None
    wanted = {"sum": 5.0, "mean": 2.5}[op]
    for value in (total, integers, plain):
        assert float(two.reduce(op, value)) == wanted
    assert two.reduce(op, rows).tolist() == [wanted]
    assert float(two.reduce(op, rows, axis=0)) == wanted
    assert local(two, total) == [1.0, 4.0]


def test_branch_on_replica_id_is_refused(two):
    def step():
        if ks.get_replica_context().replica_id_in_sync_group == 0:
            return 1.0
        return 2.0

    with pytest.raises(TypeError, match=r"keras\.ops\.where"):
        two.run(step)
    assert local(two, two.run(lambda: keras.ops.ones(()))) == [1.0, 1.0]


def test_uneven_collectives_in_transformed_functions_are_refused(two):
    value = per_replica(two, np.ones(4), np.ones(2))

    def step(x):
        total = jax.jit(lambda y: ks.get_replica_context().all_reduce("SUM", y))
        return total(x[0])

    with pytest.raises(TypeError, match="inside a function that JAX transforms"):
        two.run(step, args=(value,))


def test_variables_created_in_every_call_are_refused(two):
    with pytest.raises(ValueError, match="creates new variables every time"):
        two.run(lambda x: layers.Dense(2)(x), args=(np.ones((1, 2), "float32"),))


def test_on_read_variables_aggregate(two):
    with two.scope():
        v = keras.Variable(0.0, aggregation="sum", synchronization="on_read")
    one_and_three = per_replica(two, 1.0, 3.0)
    for total in (4.0, 8.0):
        two.run(lambda x: v.assign_add(x), args=(one_and_three,))
        assert float(v.value) == total
        assert local(two, v) == [total / 4, total * 3 / 4]
    v.assign(10.0)
    assert local(two, v) == [5.0, 5.0]
    two.run(lambda x: v.assign_add(x), args=(one_and_three,))
    assert float(v.value) == 14.0


def test_all_reduce_gradient_is_all_reduced(two):
    with two.scope():
        v = keras.Variable(7.0)

    def step(x):
        def loss():
            return ks.get_replica_context().all_reduce("SUM", x * v * v)

        _, (gradient,) = ks.value_and_grad(loss, [v])()
        return gradient

    assert local(two, two.run(step, args=(per_replica(two, 1.0, 3.0),))) == [28.0, 84.0]


@pytest.mark.needs_patch("LossScaleOptimizer._common_apply", backend="jax")
def test_loss_scaling_in_run(two):
    with two.scope():
        v = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), initial_scale=4.0
        )

    def step(x):
        def loss():
            return optimizer.scale_loss(keras.ops.sum(v * x))

        _, gradients = ks.value_and_grad(loss, [v])()
        optimizer.apply(gradients, [v])

    # The first trace builds the optimizer, so that the second one scales.
    two.run(step, args=(per_replica(two, 1.0, 3.0),))
    np.testing.assert_allclose(v.numpy(), [-1.0, 0.0])
    two.run(step, args=(per_replica(two, 1.0, float("nan")),))
    np.testing.assert_allclose(v.numpy(), [-1.0, 0.0])
    assert float(optimizer.dynamic_scale.value) == 2.0


@pytest.mark.needs_patch("Optimizer._backend_apply_gradients", backend="jax")
def test_sharded_step_sends_as_much_as_all_reduce():
    """Of gradients a replica gets its part, and the new weights are gathered."""
    client = jax.devices()[0].client

    def sent(shard):
        strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(4)], shard=shard)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), layers.Dense(16)])
            optimizer = keras.optimizers.Adam(global_clipnorm=1.0)
            optimizer.build(model.trainable_variables)

        def step(x):
            gradient_of = ks.value_and_grad(
                lambda x: keras.ops.sum(model(x) ** 2), model.trainable_variables
            )
            _, gradients = gradient_of(x)
            optimizer.apply(gradients, model.trainable_variables)

        # They are kept: the id of one that is gone may be that of a new one.
        before = client.live_executables()
        x = np.ones((8, 8), "float32")
        (batch,) = strategy.experimental_distribute_dataset([x])
        strategy.run(step, args=(batch,))
        known = {id(program) for program in before}
        made = [p for p in client.live_executables() if id(p) not in known]
        texts = [p.hlo_modules()[0].to_string() for p in made]
        found = [collectives(text, 4) for text in texts]
        (traffic,) = [some for some in found if some]
        return {kind: size for kind, (_, size) in traffic.items()}

    gradients = 4 * (8 * 16 + 16)  # bytes
    whole, parts = sent(None), sent("optimizer")
    assert whole == {"all-reduce": 2 * 3 / 4 * gradients}
    assert parts["reduce-scatter"] == parts["all-gather"] == 3 / 4 * gradients
    assert parts["all-reduce"] < 100  # the norms


@pytest.mark.parametrize(
    ("parts", "here"), [([0, 1, 0, 1], True), ([0, 1, 0, 0], False)]
)
def test_workers_agree_on_having_all_shards(parts, here):
    """Where one has them and another has not, both must bring them together."""
    values = np.arange(4.0)
    halves = (slice(0, 2),), (slice(2, 4),)
    Device = collections.namedtuple("Device", ["number", "process_index"])
    devices = {Device(i, i // 2): halves[part] for i, part in enumerate(parts)}
    array = SimpleNamespace(
        shape=values.shape,
        dtype=values.dtype,
        sharding=SimpleNamespace(devices_indices_map=lambda shape: devices),
        addressable_shards=[SimpleNamespace(index=i, data=values[i]) for i in halves],
    )
    whole = assemble_locally(array)
    assert np.array_equal(whole, values) if here else whole is None


def test_exception_leaves_clean_state(two):
    with two.scope():
        v = keras.Variable(1.0)

    def fails():
        v.assign(5.0)
        raise KeyError("boom")

    for _ in range(2):
        with pytest.raises(KeyError, match="boom"):
            two.run(fails)
        assert float(v.value) == 1.0 and local(two, v) == [1.0, 1.0]


class Failing(layers.Layer):
    fail = False

    def call(self, x):
        if Failing.fail:
            raise ArithmeticError("a layer failed")
        return x


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_error_in_first_step_keeps_weights(method, two, monkeypatch):
    with two.scope():
        model = keras.Sequential([keras.Input((6,)), Failing(), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    data = (X,) if method == "predict" else (X, Y)
    getattr(model, method)(*data, verbose=0)  # builds the metrics
    before = model.get_weights()
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "fail", True)
        with pytest.raises(ArithmeticError):
            getattr(model, method)(*data, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    getattr(model, method)(*data, verbose=0)


@pytest.mark.needs_patch("Model._get_metrics_result_or_logs", backend="jax")
def test_wait_for_last_step_is_tracked(two, monkeypatch):
    """The last step of asynchronous devices ends in a collective of the workers."""
    seconds = collections.Counter()

    @contextlib.contextmanager
    def track_operation(operation):
        start = time.monotonic()
        yield
        seconds[operation] += time.monotonic() - start

    class Slow(layers.Layer):
        def call(self, x):
            zero = jax.ShapeDtypeStruct((), "float32")
            wait = lambda _: [time.sleep(0.5), np.float32(0)][1]  # noqa: E731
            return x + jax.pure_callback(wait, zero, jax.lax.stop_gradient(x))

        def compute_output_shape(self, input_shape):
            return input_shape

    cluster = SimpleNamespace(client=SimpleNamespace(track_operation=track_operation))
    monkeypatch.setattr(two.extended.group.distribution, "cluster", cluster)
    with two.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1), Slow()])
        model.compile("sgd", "mse")
    model.fit(X[:8], Y[:8], verbose=0)
    assert seconds["the last step"] > 0.4
