"""Virtual replicas, whose results have the same bits on any number of devices."""

import json

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import assert_equal, scope, train
from keras_strategy.commands.cli import main
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError
from keras_strategy.training.reduction import find_subtrees, sum_in_tree

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(21, 4)), RANDOM.normal(size=(21, 1))
UNSUPPORTED = get_engine().virtual_replicas_unsupported_reason()
supported = pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))
on_torch, on_jax = [
    pytest.mark.skipif(keras.backend.backend() != name, reason=f"of {name} alone")
    for name in ("torch", "jax")
]


def model(optimizer=None):
    hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2)]
    made = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    made.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def virtual(devices, replicas=6, **options):
    names = [f"cpu:{i}" for i in range(devices)]
    return ks.MirroredStrategy(names, virtual_replicas=replicas, **options)


@pytest.mark.full(keep_on="jax")
@supported
def test_fit_equals_one_device_and_has_same_bits():
    one = train(None, model, X, Y)
    strategies = [virtual(n) for n in (1, 2, 3)]
    found = [train(strategy, model, X, Y) for strategy in strategies]
    for strategy, trained in zip(strategies, found, strict=True):
        assert strategy.num_replicas_in_sync == strategy.virtual_replicas == 6
        assert_equal(one, trained)
        assert trained.logs == found[0].logs
        assert ks.fingerprint(trained.model) == ks.fingerprint(found[0].model)
    assert ks.fingerprint(one.model) != ks.fingerprint(found[0].model)


@pytest.mark.full(keep_on="torch")
@supported
def test_run_equals_one_device_and_has_same_bits():
    def trained(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            made = keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh")])
            optimizer, total = keras.optimizers.Adam(0.1), keras.metrics.Mean()

        def step(batch):
            x, y = map(ops.convert_to_tensor, batch)

            def compute_loss():
                losses = ops.mean(ops.square(made(x) - y), axis=1)
                return ks.compute_average_loss(losses)

            weights = made.trainable_variables
            loss, gradients = ks.value_and_grad(compute_loss, weights)()
            optimizer.apply(gradients, weights)
            total.update_state(ops.mean(x, axis=1))
            return loss

        x, y = X.astype("float32"), Y.astype("float32")
        batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 21, 8)]
        if strategy is None:
            losses = [float(step(batch)) for batch in batches]
        else:
            data = strategy.experimental_distribute_dataset(batches)
            results = [strategy.run(step, args=(batch,)) for batch in data]
            losses = [float(strategy.reduce("SUM", result)) for result in results]
        weights = [ops.convert_to_numpy(w) for w in made.weights]
        return ks.fingerprint(made), [*weights, losses, float(total.result())]

    one = trained(None)
    found = [trained(virtual(n)) for n in (1, 2, 3)]
    for fingerprint, values in found:
        assert fingerprint == found[0][0]
        for value, first, expected in zip(values, found[0][1], one[1], strict=True):
            np.testing.assert_array_equal(value, first)
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full(keep_on="torch")
@supported
@pytest.mark.parametrize("devices", [1, 2])
def test_step_over_local_rows_equals_one_device(devices, caplog):
    """On JAX it is one program without virtual replicas."""

    class Center(layers.Layer):
        def call(self, x):
            return x - ops.mean(x, axis=0, keepdims=True)

    def make():
        made = keras.Sequential([keras.Input((4,)), Center(), layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    options = {"batch_size": 21, "predicted": 0}
    one = train(None, make, X, Y, **options)
    assert_equal(one, train(virtual(devices), make, X, Y, **options))
    assert "differs from one device's" in caplog.text


@pytest.mark.full(keep_on="jax")
@supported
def test_half_floats_with_loss_scale_have_same_bits():
    """The sums of gradients precede the condition that applies them."""

    def trained(devices):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return train(virtual(devices), model, X, Y)
        finally:
            keras.config.set_dtype_policy("float32")

    first, second = trained(1), trained(3)
    assert isinstance(first.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert ks.fingerprint(first.model) == ks.fingerprint(second.model)
    assert first.logs == second.logs


@supported
def test_weights_that_differ_at_the_end_of_a_step_are_refused(audit_mode):
    audit_mode("off")

    class Assigning(keras.Model):
        def __init__(self):
            super().__init__()
            self.kernel = self.add_weight(name="kernel", shape=())

        def call(self, x):
            return self.kernel * x

        def train_step(self, *arguments):
            x, _ = arguments[-1]
            value = self.kernel + ops.mean(x)
            if keras.backend.backend() != "jax":
                self.kernel.assign(value)
                return {"loss": value}
            _, *others = arguments[0]
            return {"loss": value}, ([value], *others)

    with virtual(2).scope():
        made = Assigning()
        made.compile("sgd", "mse")
    with pytest.raises(ValueError, match="kernel'.* differs between"):
        made.fit(X[:12], Y[:12], batch_size=12, verbose=0)


@pytest.mark.full(keep_on="torch")
@supported
def test_state_without_aggregation_must_be_equal(audit_mode):
    audit_mode("off")

    class Remembering(layers.Layer):
        def build(self, shape):
            self.last = self.add_weight((), "zeros", trainable=False, name="last")
            self.steps = self.add_weight((), "zeros", trainable=False, name="steps")

        def call(self, x):
            self.steps.assign(self.steps + 1)
            if self.remembers:
                self.last.assign(ops.mean(x))
            return x

    layer = Remembering()
    layer.remembers = False
    with virtual(2).scope():
        made = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
        made.compile("sgd", "mse")
    made.fit(X, Y, batch_size=12, verbose=0)
    assert int(layer.steps) == 2
    layer.remembers = True
    made.compile("sgd", "mse")
    with pytest.raises(ValueError, match="last' was assigned .* has no aggregation"):
        made.fit(X[:12], Y[:12], batch_size=12, verbose=0)


@on_jax
def test_steps_per_execution_has_same_bits():
    def fit(steps):
        keras.utils.set_random_seed(1)
        with virtual(2).scope():
            made = model()
            made.compile("adam", "mse", steps_per_execution=steps)
        ends = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(batch)
        )
        made.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[count])
        predictions = made.predict(X, batch_size=8, verbose=0)
        return ks.fingerprint(made), predictions, ends

    one, several = fit(1), fit(2)
    assert one[0] == several[0]
    np.testing.assert_array_equal(one[1], several[1])
    assert one[2] == [0, 1, 2] * 2 and several[2] == [1, 3] * 2


@supported
def test_communication_in_a_loop():
    """BatchNormalization in a cell of an RNN is such code."""

    def step(x):
        sum_all = ks.get_replica_context().all_reduce
        one = ops.max(x) - ops.max(x) + 1  # of each iteration

        def body(state, row):
            total, count = state
            total = sum_all("SUM", total * row) * one
            return (total, count + 1), total * row

        return ops.scan(body, (ops.ones(()), ops.zeros(())), x, reverse=True)

    rows = np.float32([2, 3, 5])
    for devices in (1, 2):
        (total, count), outputs = virtual(devices).run(step, args=(rows,))
        assert float(count.values[0]) == 3
        assert float(total.values[0]) == 6**3 * 30
        assert outputs.values[0].tolist() == [6**3 * 60, 6**2 * 45, 6 * 25]


@pytest.fixture
def jax_option():
    """Switches an option of JAX on for a test, which older versions lack."""
    import jax

    names = []

    def switch_on(name):
        if not hasattr(jax.config, name):
            pytest.skip(f"this JAX has no {name}")
        names.append(name)
        jax.config.update(name, True)

    yield switch_on
    for name in names:
        jax.config.update(name, False)


@on_jax
@pytest.mark.parametrize("option", [None, "jax_remat3", "jax_custom_vjp3"])
def test_communication_in_a_called_function(option, jax_option):
    """With an option, JAX calls functions by primitives that other code may define."""
    import jax

    if option:
        jax_option(option)

    @jax.custom_vjp
    def sum_squares(x):
        return ks.get_replica_context().all_reduce("SUM", x * x)

    sum_squares.defvjp(lambda x: (sum_squares(x), x), lambda x, g: (2 * x * g,))

    def step(x):
        return jax.value_and_grad(jax.checkpoint(lambda x: sum_squares(x) * x))(x)

    total, gradient = virtual(2).run(step, args=(np.float32(3),))
    assert float(total.values[0]) == 6 * 9 * 3
    assert float(gradient.values[0]) == 6 * 9 + 2 * 9


@on_jax
def test_mutable_arrays_are_refused(jax_option):
    jax_option("jax_scan3")
    rows = np.float32([2, 3])
    with pytest.raises(ValueError, match="`new_ref`.*jax_scan3"):
        virtual(2).run(lambda: ops.scan(lambda c, x: (c + x, x), ops.ones(()), rows))


@on_jax
def test_communication_in_a_condition_is_refused():
    def step():
        sum_all = ks.get_replica_context().all_reduce
        one = ops.ones(())
        return ops.cond(one > 0, lambda: sum_all("SUM", one), lambda: one)

    with pytest.raises(ValueError, match="inside of `cond`"):
        virtual(2).run(step)


@on_jax
@pytest.mark.parametrize(
    ("name", "renamed"),
    [("all_gather", "tiled"), ("reduce_scatter", "axis_size"), ("scan", "reverse")],
)
def test_renamed_parameters_of_a_primitive_are_reported(name, renamed, monkeypatch):
    import jax

    from keras_strategy.backends.jax.distribution import AXIS

    def body(x):
        if name == "reduce_scatter":
            return jax.lax.psum_scatter(x, AXIS, tiled=True)
        if name == "all_gather":
            return jax.lax.all_gather(x, AXIS)
        return jax.lax.scan(lambda c, x: (c, jax.lax.psum(x, AXIS)), 0, x)

    def make_jaxpr(function, **options):
        def traced(*args):
            made = make(function, **options)(*args)
            # A gather is bound again before its parameters are read.
            is_first = isinstance(made, tuple)
            if is_first != (name == "all_gather"):
                for equation in (made[0] if is_first else made).jaxpr.eqns:
                    if equation.primitive.name == name:
                        equation.params["new"] = equation.params.pop(renamed)
            return made

        return traced

    make = jax.make_jaxpr
    monkeypatch.setattr(jax, "make_jaxpr", make_jaxpr)
    with pytest.raises(ValueError, match=rf"\['{renamed}'\] of JAX's `{name}`.*'new'"):
        virtual(2).run(lambda: body(jax.numpy.ones(6)))


@on_jax
def test_step_overwrites_variables():
    from keras_strategy.keras_patches.internals import stored_value

    for devices in (1, 2):
        with virtual(devices).scope():
            made = model()
        made.fit(X[:12], Y[:12], batch_size=12, verbose=0)
        weights = [*made.trainable_variables, *made.optimizer.variables]
        before = [stored_value(v).addressable_shards[0].data for v in weights]
        made.fit(X[:12], Y[:12], batch_size=12, verbose=0)
        deleted = [array.is_deleted() for array in before]
        assert sum(deleted) >= len(made.trainable_variables) * 3


@on_jax
def test_gpus_need_deterministic_kernels(monkeypatch):
    from keras_strategy.backends.jax.virtual_replicas import check_deterministic

    check_deterministic("cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    check_deterministic("gpu")
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(ValueError, match="XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        check_deterministic("gpu")


@on_torch
@pytest.mark.parametrize("in_place", [False, True], ids=["run", "fit"])
def test_optimizer_updates_once_on_each_device(in_place):
    """And all replicas of a device read what it has written."""
    updates = []

    class Counting(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            updates.append(variable.path)
            super().update_step(gradient, variable, learning_rate)

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, use_bias=False)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data

            def compute_loss():
                return self.compute_loss(x, y, self(x, training=True))

            weights = self.trainable_variables
            compute_gradients = ks.value_and_grad(compute_loss, weights)
            for _ in range(2):
                value, gradients = compute_gradients()
                self.optimizer.apply(gradients, weights)
            return {"loss": value}

    def trained(strategy):
        with scope(strategy):
            made = Twice()
            made(X[:2])
            made.dense.kernel.assign(np.ones((4, 1)))
            made.compile(Counting(0.1), "mse")
        if in_place:
            made.fit(X[:12], Y[:12], batch_size=12, verbose=0)
        elif strategy is None:
            made.train_step((X[:12], Y[:12]))
        else:
            data = strategy.experimental_distribute_dataset([(X[:12], Y[:12])])
            strategy.run(made.train_step, args=(next(iter(data)),))
        return ops.convert_to_numpy(made.dense.kernel)

    expected = trained(None)
    assert len(updates) == 2
    updates.clear()
    np.testing.assert_allclose(trained(virtual(1)), expected, rtol=1e-5)
    assert len(updates) == 2


@supported
def test_replicas_of_a_device_share_its_variables():
    strategy = virtual(1)
    with strategy.scope():
        weight, total = keras.Variable(np.ones(3)), keras.metrics.Sum()
    replicas = ops.arange(6, dtype="float32")
    values = strategy.experimental_distribute_values_from_function(
        lambda context: replicas[context.replica_id_in_sync_group]
    )

    def step(value):
        total.update_state(value)
        return ops.sum(weight * value)

    sums = strategy.run(step, args=(values,))
    assert [float(x) for x in sums.values] == [0, 3, 6, 9, 12, 15]
    assert float(total.result()) == 15
    if keras.backend.backend() == "torch":
        parts = strategy.experimental_local_results(weight)
        assert len({ops.convert_to_tensor(part).data_ptr() for part in parts}) == 1


@supported
def test_memory_report_counts_shared_variables_once():
    strategy = virtual(1)
    with strategy.scope():
        made = model()
    weights = sum(v.value.nbytes for v in made.trainable_variables)
    report = strategy.memory_report(made)
    assert report.parameters == (weights, *[0] * 5)


@pytest.mark.full(keep_on="torch")
@supported
def test_assignments_in_run_are_merged_or_refused():
    """Replicas of a device have one copy, so that each cannot keep its own value."""

    def trained(devices):
        strategy = virtual(devices)
        with strategy.scope():
            layer = layers.BatchNormalization(momentum=0.5)
            layer.build((None, 4))
        batches = strategy.experimental_distribute_dataset([X[:12], X[:18]])
        for batch in batches:
            strategy.run(lambda x: layer(x, training=True), args=(batch,))
        return [ops.convert_to_numpy(v) for v in layer.weights]

    expected = 0.25 * 0 + 0.25 * X[:12].mean(0) + 0.5 * X[:18].mean(0)
    for found in map(trained, (1, 2, 3)):
        np.testing.assert_allclose(found[2], expected, rtol=1e-5)
        np.testing.assert_array_equal(found[3], trained(1)[3])
    strategy = virtual(1)
    with strategy.scope():
        own = keras.Variable(0.0, name="own")

    def assign():
        own.assign(ks.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(ValueError, match="'own' is stored once for several replicas"):
        strategy.run(assign)
    assert float(own) == 0


@supported
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_follows_the_tree(op):
    numbers = np.float32([1e8, 1.0, -1e8, 3e-3, 7.0, 1e-4])

    def reduced(devices):
        strategy = virtual(devices)
        values = strategy.experimental_distribute_values_from_function(
            lambda context: numbers[context.replica_id_in_sync_group]
        )
        inside = strategy.run(
            lambda x: ks.get_replica_context().all_reduce(op, x), args=(values,)
        )
        outside = strategy.reduce(op, values)
        assert len(set(map(float, inside.values))) == 1
        return float(inside.values[0]), float(outside)

    a, b, c, d, e, f = numbers
    expected = ((a + b) + (c + d)) + (e + f)
    inside, outside = reduced(1)
    assert (inside, outside) == reduced(3)
    assert outside == (expected if op == "SUM" else expected / 6)
    # A compiled mean may multiply by 1 / 6.
    assert inside == (outside if op == "SUM" else pytest.approx(outside, rel=1e-6))


@pytest.mark.parametrize("replicas", [1, 2, 5, 12, 13])
def test_subtrees_of_any_split_have_one_sum(replicas):
    numbers = np.random.RandomState(replicas).normal(size=replicas).astype("float32")
    leaves = {range(i, i + 1): number for i, number in enumerate(numbers)}
    whole = sum_in_tree(range(replicas), leaves, np.add)
    for size in range(1, replicas + 1):
        parts = {}
        for begin in range(0, replicas, size):
            own = range(begin, min(begin + size, replicas))
            for subtree in find_subtrees(own, range(replicas)):
                parts[subtree] = sum_in_tree(subtree, leaves, np.add)
        assert sum_in_tree(range(replicas), parts, np.add) == whole


@on_torch
def test_functions_without_deterministic_kernel_are_refused():
    torch = pytest.importorskip("torch")
    place, one = torch.tensor([0]), torch.ones(1)
    with pytest.raises(RuntimeError, match="put_.*deterministic"):
        virtual(1).run(lambda: torch.zeros(3).put_(place, one))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.zeros(3).put_(place, one)[0] == 1


@on_torch
def test_replicas_compute_with_one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        strategy = virtual(1)
        for _ in range(2):
            torch.set_num_threads(2)
            assert strategy.run(torch.get_num_threads) == 1
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full(keep_on="torch")
@supported
@pytest.mark.parametrize("devices", [2, 3])
def test_resume_on_other_devices_has_same_bits(devices, tmp_path):
    def fit(devices, epochs, folder):
        keras.utils.set_random_seed(1)
        with (strategy := virtual(devices)).scope():
            made = model()
        backup = ks.callbacks.BackupAndRestore(
            tmp_path / folder, delete_checkpoint=epochs == 3
        )
        made.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[backup])
        assert strategy.num_replicas_in_sync == 6
        return ks.fingerprint(made)

    fit(1, 2, "interrupted")
    assert fit(devices, 3, "interrupted") == fit(1, 3, "whole")


@supported
def test_resume_compares_the_fingerprint(tmp_path):
    backup = ks.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    def fit(policy):
        keras.config.set_dtype_policy(policy)
        try:
            with virtual(1).scope():
                made = model(keras.optimizers.SGD())
        finally:
            keras.config.set_dtype_policy("float32")
        made.fit(X, Y, batch_size=8, verbose=0, callbacks=[backup])

    fit("float32")
    with pytest.raises(ValueError, match=r"have the fingerprint \w+, not \w+ as when"):
        fit("float16")


@pytest.mark.parametrize("number", [0, True, "2"])
def test_bad_numbers_are_refused(number):
    message = f"positive whole number.*virtual_replicas={number!r}"
    for create in (ks.MirroredStrategy, ks.MultiWorkerMirroredStrategy):
        with pytest.raises(ValueError, match=message):
            create(virtual_replicas=number)


@supported
def test_number_that_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="a multiple .* 2. Received: .*=9, .* 1, 3, 9"):
        virtual(2, 9)


@supported
def test_options_that_decide_other_sums_are_refused():
    class Own(ks.CrossDeviceOps):
        def reduce_implementation(self, *args):
            """Never called."""

    with pytest.raises(ValueError, match="cannot be combined with `shard`"):
        virtual(1, shard="optimizer")
    with pytest.raises(ValueError, match="an order of its own"):
        virtual(1, cross_device_ops=Own())


@pytest.mark.skipif(UNSUPPORTED is None, reason="supported")
def test_backend_without_virtual_replicas_is_refused():
    with pytest.raises(UnsupportedBackendError, match="KERAS_BACKEND=torch"):
        virtual(2)
    with pytest.raises(UnsupportedBackendError, match="KERAS_BACKEND=torch"):
        ks.MultiWorkerMirroredStrategy(virtual_replicas=4)


def test_fingerprint_has_all_bits():
    made = model()
    made.optimizer.build(made.trainable_variables)
    whole, weights = ks.fingerprint(made), ks.fingerprint(made, optimizer=False)
    assert whole == ks.fingerprint(made) != weights
    assert str(whole) == whole.sha256 and len(whole.sha256) == 64
    made.optimizer.iterations.assign(1)
    assert ks.fingerprint(made) != whole
    assert ks.fingerprint(made, optimizer=False) == weights
    kernel = made.layers[0].kernel
    kernel.assign(np.nextafter(ops.convert_to_numpy(kernel), 1))
    assert ks.fingerprint(made, optimizer=False) != weights


def test_fingerprint_refuses_what_has_no_bits():
    with pytest.raises(TypeError, match="model='model' of type str"):
        ks.fingerprint("model")
    with pytest.raises(ValueError, match="has no variables yet"):
        ks.fingerprint(keras.Sequential([layers.Dense(1)]))


def test_compare_names_first_difference(tmp_path, capsys, mirrored):
    first, second, third = [tmp_path / f"{name}.json" for name in "abc"]
    keras.utils.set_random_seed(1)
    with mirrored(2).scope():
        made = model()
    ks.fingerprint(made).save(first)
    ks.fingerprint(made).save(second)
    assert main(["compare", str(first), str(second)]) == 0
    assert "Equal: " in capsys.readouterr().out
    bias = made.layers[0].bias
    bias.assign(np.ones(bias.shape))
    ks.fingerprint(made).save(second)
    report = json.loads(second.read_text())
    report["conditions"]["Keras"] = "3.0"
    second.write_text(json.dumps(report))
    assert main(["compare", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert f"Other Keras: {keras.__version__} and 3.0." in out
    assert f"in the bits of variable 1, '{bias.path}'" in out
    ks.fingerprint(made, optimizer=False).save(third)
    assert main(["compare", str(second), str(third)]) == 1
    assert "variables." in capsys.readouterr().out
    third.write_text("[]")
    assert main(["compare", str(first), str(third)]) == 2
    assert "is not a report" in capsys.readouterr().err
