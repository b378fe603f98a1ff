"""TPUStrategy over simulated TPUs: the weights of one device."""

import functools
import logging
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.testing import simulated_tpu

jax_alone = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="TPUStrategy is there on JAX"
)
build = ks.tpu.experimental.DeviceAssignment.build
LAYOUTS = {"wide/kernel": (1, 2), "wide/bias": (2,), "narrow/kernel": (2, 1)}


def strategy_of(per_replica, layout_map=None, mesh=(2, 1, 1, 2), shard=None):
    return ks.TPUStrategy(
        simulated_tpu(mesh),
        devices_per_replica=per_replica,
        layout_map=layout_map,
        shard=shard,
    )


class Split(layers.Layer):
    """Splits its input over the logical devices, and brings it together."""

    def __init__(self, strategy, parts):
        super().__init__()
        self.strategy, self.parts = strategy, parts

    def call(self, x):
        if self.strategy is None:
            return x
        x = self.strategy.experimental_split_to_logical_devices(x, self.parts)
        x = self.strategy.experimental_assign_to_logical_device(ops.tanh(x), 0)
        return self.strategy.experimental_replicate_to_logical_devices(x * 2)


def images_model(strategy, parts):
    """Convolutions over images whose rows of pixels are split."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", activation="tanh"),
            Split(strategy, parts) if strategy else layers.Lambda(_same),
            layers.BatchNormalization(),
            layers.Conv2D(4, 3, padding="same", activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8, "tanh", name="wide"),
            layers.Dense(4, "tanh", name="narrow"),
            layers.Dropout(0.3, seed=1),
            layers.Dense(1),
        ]
    )


def _same(x):
    return ops.tanh(x) * 2


def trained(strategy, parts=(1, 2, 1, 1)):
    """A model after some epochs, with a last batch that nothing divides."""
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(21, 8, 8, 3)).astype("float32")
    y = generator.normal(size=(21, 1)).astype("float32")
    with (strategy or ks.OneDeviceStrategy("cpu:0")).scope():
        model = images_model(strategy, list(parts))
        optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5, use_ema=True)
        model.compile(optimizer, "mse", metrics=["mae"])
    logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model, logs.history, (x, y)


@pytest.fixture(scope="module")
def alone():
    model, logs, data = trained(None)
    x, y = data
    return (
        [v.numpy() for v in (*model.variables, *model.optimizer.variables)],
        logs,
        model.evaluate(x, y, batch_size=8, verbose=0),
        model.predict(x, batch_size=8, verbose=0),
    )


@pytest.mark.full(keep=1)
@jax_alone
@pytest.mark.parametrize(
    "per_replica, parts, layout_map",
    [(2, (1, 2, 1, 1), LAYOUTS), (4, (2, 2, 1, 1), LAYOUTS)],
    ids=["2x2", "1x4"],
)
def test_fit_equals_one_device(alone, per_replica, parts, layout_map, tmp_path):
    weights, logs, evaluated, predicted = alone
    strategy = strategy_of(per_replica, layout_map)
    assert strategy.num_replicas_in_sync == 4 // per_replica
    model, own_logs, (x, y) = trained(strategy, parts)
    state = [*model.variables, *model.optimizer.variables]
    for variable, value in zip(state, weights, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), value, atol=2e-5, err_msg=variable.path
        )
    for name, values in logs.items():
        np.testing.assert_allclose(own_logs[name], values, atol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=8, verbose=0), evaluated, atol=1e-5
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=8, verbose=0), predicted, atol=1e-5
    )
    wide = model.get_layer("wide").kernel
    slots = [v for v in model.optimizer.variables if "wide_kernel" in v.path]
    for variable in (wide, *slots):
        assert variable.value.addressable_shards[0].data.shape == (
            (4, 4) if layout_map else (4, 8)
        ), variable.path
    (component, *_) = strategy.experimental_local_results(wide)
    assert component.shape == (4, 8)
    model.save_weights(tmp_path / "a.weights.h5")
    other = images_model(None, None)
    other.load_weights(tmp_path / "a.weights.h5")
    for mine, own in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), own.numpy())
    model.load_weights(tmp_path / "a.weights.h5")
    assert wide.value.addressable_shards[0].data.shape == (
        (4, 4) if layout_map else (4, 8)
    )


def steps(strategy, split):
    """A loop of one's own: weights and what the steps returned."""
    keras.utils.set_random_seed(5)
    generator = np.random.default_rng(1)
    x = generator.normal(size=(14, 4)).astype("float32")
    batches = [(x[i : i + 4], x[i : i + 4, :1]) for i in range(0, 14, 4)]
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, "tanh", name="wide"),
                layers.Dense(4, "tanh", name="narrow"),
                layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
        total = keras.Variable(0.0, synchronization="on_read", aggregation="sum")

    def step(batch):
        features, target = batch
        if split:
            features = strategy.experimental_split_to_logical_devices(features, [1, 2])

        def loss_of(features):
            difference = ops.square(model(features) - target)
            return ks.compute_average_loss(
                ops.mean(difference, axis=-1), global_batch_size=4
            )

        loss, gradients = ks.value_and_grad(loss_of, model.trainable_variables)(
            features
        )
        optimizer.apply(gradients, model.trainable_variables)
        total.assign_add(loss)
        context = ks.get_replica_context()
        return loss, context.all_reduce("SUM", loss), context.all_gather(target, 0)

    results = []
    for batch in strategy.experimental_distribute_dataset(batches):
        loss, everywhere, _ = strategy.run(step, args=(batch,))
        results.append(float(strategy.reduce("SUM", loss)))
        first, *_ = strategy.experimental_local_results(everywhere)
        np.testing.assert_allclose(first, results[-1], atol=1e-6)
    values = [v.numpy() for v in (*model.variables, *optimizer.variables, total)]
    return values, results, model


@functools.cache
def steps_alone():
    return steps(ks.OneDeviceStrategy("cpu:0"), False)


@pytest.mark.full(keep=1)
@jax_alone
@pytest.mark.parametrize("per_replica", [2, 4])
def test_custom_loop_equals_one_device(per_replica):
    weights, losses, _ = steps_alone()
    strategy = strategy_of(per_replica, LAYOUTS)
    own, own_losses, model = steps(strategy, per_replica == 2)
    for mine, value in zip(own, weights, strict=True):
        np.testing.assert_allclose(mine, value, atol=2e-5)
    np.testing.assert_allclose(own_losses, losses, atol=1e-5)
    wide = model.get_layer("wide").kernel
    assert wide.value.addressable_shards[0].data.shape == (4, 4)


@jax_alone
def test_indivisible_rows_in_custom_loop():
    """Replicas in turns, of which each has weights that its devices share."""
    strategy = strategy_of(2, LAYOUTS)
    with strategy.scope():
        wide = layers.Dense(8, use_bias=False, name="wide")
        wide.build((None, 4))
        seen = keras.Variable(0.0, synchronization="on_read", aggregation="sum")

    def step(x):
        x = strategy.experimental_replicate_to_logical_devices(x)
        seen.assign_add(ops.sum(x))
        wide.kernel.assign(wide.kernel + 1)
        with pytest.raises(ValueError, match="partition_dimensions\\[1\\]"):
            strategy.experimental_split_to_logical_devices(x[:, :3], [1, 2])
        return ops.sum(wide(x))

    x = np.arange(12, dtype="float32").reshape(3, 4)  # 2 rows and 1
    (batch,) = strategy.experimental_distribute_dataset([x])
    kernel = wide.kernel.numpy()
    total = strategy.reduce("SUM", strategy.run(step, args=(batch,)))
    np.testing.assert_allclose(total, np.sum(x @ (kernel + 1)), rtol=1e-5)
    np.testing.assert_allclose(wide.kernel.numpy(), kernel + 1, rtol=1e-6)
    assert float(seen) == x.sum()
    assert wide.kernel.value.addressable_shards[0].data.shape == (4, 4)


def dense_model(optimizer):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, "tanh", name="wide"),
            layers.Dense(4, "tanh", name="narrow"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


@jax_alone
def test_weights_equal_keras_model_parallel():
    """Of one LayoutMap, on the mesh that it names."""
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], [f"cpu:{i}" for i in range(4)]
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*wide.*kernel"] = (None, "model")
    layout_map[".*narrow.*kernel"] = ("model", None)
    x = np.random.default_rng(2).normal(size=(16, 4)).astype("float32")
    weights = []
    for kind in ("keras", "ours"):
        keras.utils.set_random_seed(7)
        if kind == "keras":
            parallel = keras.distribution.ModelParallel(
                layout_map=layout_map, batch_dim_name="batch"
            )
            scope = parallel.scope()
        else:
            scope = strategy_of(2, layout_map).scope()
        with scope:
            model = dense_model("adam")
            model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        wide = model.get_layer("wide").kernel.value
        assert wide.addressable_shards[0].data.shape == (4, 4)
        weights.append([v.numpy() for v in model.weights])
    for theirs, own in zip(*weights, strict=True):
        np.testing.assert_allclose(own, theirs, atol=2e-5)


@pytest.mark.full(keep=1)
@jax_alone
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_sharded_state_of_replicas(shard):
    """Parts of the parts that the logical devices have."""
    x = np.random.default_rng(2).normal(size=(13, 4)).astype("float32")

    def trained(strategy):
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = dense_model(keras.optimizers.AdamW(1e-2, clipnorm=0.5))

        def loss_of(x):
            squares = ops.mean((model(x) - x[:, :1]) ** 2, axis=-1)
            return ks.compute_average_loss(squares)

        def step(x):
            _, gradients = ks.value_and_grad(loss_of, model.trainable_variables)(x)
            model.optimizer.apply(gradients, model.trainable_variables)

        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        for batch in strategy.experimental_distribute_dataset([x[:8], x[8:]]):
            strategy.run(step, args=(batch,))
        return model, [v.numpy() for v in (*model.weights, *model.optimizer.variables)]

    strategy = strategy_of(2, LAYOUTS, shard=shard)
    (_, alone), (model, own) = trained(ks.OneDeviceStrategy("cpu:0")), trained(strategy)
    for value, ours in zip(alone, own, strict=True):
        np.testing.assert_allclose(ours, value, atol=2e-5)
    report = strategy.memory_report(model)
    # Kernels of 32, 32 and 4, and biases of 8, 4 and 1, of which the logical devices
    # split the first two and the bias of 8; the replicas have halves, but of the 1.
    halves, quarters = 4 * (4 + 4 + 1), 4 * (32 + 32 + 8)
    shared = quarters // 4 + 4 * (4 + 4) // 2 + 4
    whole = quarters // 2 + halves
    assert report.parameters == (shared if shard == "parameters" else whole,) * 2
    assert 4 < report.slots[0] - 2 * shared < 17
    assert pickle.loads(pickle.dumps(strategy)).shard == shard


@jax_alone
def test_optimizers_with_other_slot_shapes():
    x = np.random.default_rng(2).normal(size=(9, 4)).astype("float32")
    weights = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), strategy_of(2, LAYOUTS)):
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = dense_model(keras.optimizers.Adafactor(1e-2))
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        state = [*model.weights, *model.optimizer.variables]
        weights.append([v.numpy() for v in state])
    for alone, own in zip(*weights, strict=True):
        np.testing.assert_allclose(own, alone, atol=2e-5)
    report = strategy.memory_report(model)
    assert report.parameters == (4 * (32 + 8 + 32 + 4 + 4 + 1) - 4 * (16 + 4 + 16),) * 2


@jax_alone
def test_device_assignment_selects_cores():
    tpu = simulated_tpu((2, 1, 1, 2))
    topology = ks.tpu.experimental.initialize_tpu_system(tpu)
    assignment = build(topology, [2, 1, 1, 1], num_replicas=2)
    strategy = ks.TPUStrategy(tpu, assignment, True)
    assert strategy.cluster_resolver is tpu
    assert repr(strategy) == (
        "TPUStrategy(devices=[['cpu:0', 'cpu:2'], ['cpu:1', 'cpu:3']])"
    )
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    assert repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)
    again = pickle.loads(pickle.dumps(strategy_of(2, LAYOUTS)))
    assert again.logical_devices.layouts.layout_map == LAYOUTS
    with pytest.raises(ValueError, match="SPMD mode"):
        strategy.experimental_assign_to_logical_device(ops.ones(2), 0)
    one = build(topology, num_replicas=1)
    assert ks.TPUStrategy(tpu, one).num_replicas_in_sync == 1
    with pytest.warns(DeprecationWarning):
        assert ks.experimental.TPUStrategy(tpu, one).num_replicas_in_sync == 1
    ks.tpu.experimental.shutdown_tpu_system(tpu)


@jax_alone
def test_unsupported_features_of_logical_devices(caplog):
    strategy = strategy_of(2)
    x = ops.ones((4, 6))
    split = strategy.experimental_split_to_logical_devices
    for parts, why in [([2], "rank"), ([1, 1], "product"), ([-1, -2], "product")]:
        with pytest.raises(ValueError, match=why):
            split(x, parts)
    with pytest.raises(ValueError, match="must be divisible"):
        split(ops.ones((4, 3)), [1, 2])
    with pytest.raises(ValueError, match="Lambda"):
        split(keras.Input((6,)), [1, 2])
    assign = strategy.experimental_assign_to_logical_device
    with caplog.at_level(logging.INFO, "keras_strategy"):
        assert assign(x, 1) is x and assign(x, 0) is x
    assert sum("no effect on JAX" in r.message for r in caplog.records) == 1
    for number in (-1, 2):
        with pytest.raises(ValueError, match=f"id {number}.* 2 logical"):
            assign(x, number)


@jax_alone
@pytest.mark.parametrize(
    "given, error, why",
    [
        ({"tpu_cluster_resolver": "local"}, TypeError, "simulated_tpu"),
        ({"tpu_cluster_resolver": None}, ValueError, "no TPU on this machine"),
        ({"devices_per_replica": 3}, ValueError, "divides .* which is 4.*=3"),
        ({"devices_per_replica": True}, ValueError, "=True"),
        ({"shard": "weights"}, ValueError, "shard='weights'"),
        ({"experimental_device_assignment": "all"}, TypeError, "'all'"),
        ({"layout_map": ["kernel"]}, TypeError, "layout_map"),
        ({"layout_map": {"kernel": 2}}, ValueError, "a number of parts"),
        ({"layout_map": {"kernel": (1, 3)}}, ValueError, "divide the number .* is 2"),
        ({"layout_map": {"(": (1, 2)}}, ValueError, "regular expression"),
    ],
)
def test_mismatched_arguments_are_refused(given, error, why):
    arguments = {"tpu_cluster_resolver": simulated_tpu((2, 1, 1, 2)), **given}
    if "experimental_device_assignment" not in given:
        arguments.setdefault("devices_per_replica", 2)
    with pytest.raises(error, match=why):
        ks.TPUStrategy(**arguments)


@jax_alone
def test_assignment_of_another_tpu_is_refused():
    other = ks.tpu.experimental.initialize_tpu_system(simulated_tpu((1, 1, 1, 2)))
    tpu = simulated_tpu((2, 1, 1, 2))
    topology = ks.tpu.experimental.initialize_tpu_system(tpu)
    twice = ks.tpu.experimental.DeviceAssignment(topology, [[[0] * 4], [[0] * 4]])
    for assignment, why in [(build(other), "topology"), (twice, "its own cores")]:
        with pytest.raises(ValueError, match=why):
            ks.TPUStrategy(tpu, assignment)
    with pytest.raises(ValueError, match="devices_per_replica"):
        ks.TPUStrategy(tpu, build(topology), devices_per_replica=1)


@jax_alone
@pytest.mark.parametrize(
    "layout_map, why",
    [
        ({"wide/kernel": (2,)}, "does not fit .*wide/kernel"),
        ({"last/kernel": (1, 2)}, r"does not fit .*\(8, 3\)"),
        ({"wide": (1, 2), "kernel": (1, 2)}, "must match one key"),
    ],
)
def test_mismatched_layout_is_refused(layout_map, why):
    with strategy_of(2, layout_map).scope():
        model = keras.Sequential(
            [layers.Dense(8, name="wide"), layers.Dense(3, name="last")]
        )
        with pytest.raises(ValueError, match=why):
            model.build((None, 4))


@jax_alone
@pytest.mark.parametrize("by", ["fit", "run"])
def test_unused_layout_entry_is_refused(by, caplog):
    strategy = strategy_of(2, {**LAYOUTS, "wide/kernal": (1, 2)})
    with strategy.scope():
        model = dense_model("sgd")
        model.optimizer.build(model.trainable_variables)
    x = np.ones((4, 4), "float32")

    def step():
        gradients = [v + 1 for v in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)

    assert not caplog.messages
    for _ in range(2):
        if by == "fit":
            model.fit(x, x[:, :1], verbose=0)
        else:
            strategy.run(step)
    (said,) = caplog.messages
    assert "layout_map['wide/kernal'] splits nothing" in said
    assert f"weights are: '{model.get_layer('wide').kernel.path}'" in said


@jax_alone
def test_devices_of_a_real_tpu(monkeypatch):
    from types import SimpleNamespace

    import jax

    from keras_strategy.backends.jax import connection

    found = [
        SimpleNamespace(coords=[x, 4, 0], core_on_chip=core)
        for x in (2, 3)
        for core in (0, 1)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda backend: found)
    assert connection.tpu_coordinates()[1] == (2, 4, 0, 1)
    topology = ks.tpu.experimental.initialize_tpu_system()
    assert topology.mesh_shape.tolist() == [2, 1, 1, 2]
    assert topology.tpu_device_ordinal_at_coordinates([1, 0, 0, 1]) == 3


def test_missing_tpu_is_reported():
    with pytest.raises(ValueError, match="no TPU on this machine"):
        ks.tpu.experimental.initialize_tpu_system()
    for shape in ((2, 2), (2, 0, 1, 1), (2, 1, 1, True)):
        with pytest.raises(ValueError, match="mesh_shape"):
            simulated_tpu(shape)
    topology = ks.tpu.experimental.initialize_tpu_system(simulated_tpu((2, 1, 1, 2)))
    assert topology.num_tpus_per_task == 4
    hosts = ks.cluster_resolver.TPUClusterResolver("grpc://a:1,grpc://b:1")
    tpu = simulated_tpu((2, 1, 1, 2), hosts)
    assert tpu.tpu_system.topology.device_coordinates.shape == (2, 2, 4)
    assert "(2, 1, 1, 2), <" in repr(tpu)
    with pytest.raises(ValueError, match="2 hosts .*which is 3"):
        simulated_tpu((3, 1, 1, 1), hosts)
    with pytest.raises(TypeError, match="hosts='a'"):
        simulated_tpu((2, 1, 1, 2), "a")
    if keras.backend.backend() != "jax":
        with pytest.raises(ks.errors.UnsupportedBackendError, match="BACKEND=jax"):
            strategy_of(2)


@jax_alone
def test_virtual_replicas_have_bits_of_one_device():
    x = np.random.RandomState(0).normal(size=(20, 3))

    def fit(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh")])
            model.compile("adam", "mse")
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return strategy.num_replicas_in_sync, ks.fingerprint(model)

    tpu = ks.TPUStrategy(simulated_tpu((2, 1, 1, 2)), virtual_replicas=8)
    one = ks.MirroredStrategy(["cpu:0"], virtual_replicas=8)
    assert fit(tpu) == fit(one)
    with pytest.raises(ValueError, match="virtual_replicas=8 and 2 logical devices"):
        ks.TPUStrategy(
            simulated_tpu((2, 1, 1, 2)), devices_per_replica=2, virtual_replicas=8
        )
