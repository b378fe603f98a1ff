"""State that the replicas share: `shard="optimizer"` and `shard="parameters"`."""

import contextlib
import copy
import logging
import pickle

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError
from keras_strategy.training.sharding import ShardSpec, dimension_to_shard
from tests.equality.__main__ import mirrored, run
from tests.equality.cases import Case, optimizer
from tests.equality.compare import assert_equal, train
from tests.training.shared import alone

MODES = [
    s
    for s in ("optimizer", "parameters")
    if not get_engine().sharding_unsupported_reason(s)
]
REFUSED = [s for s in ("optimizer", "parameters") if s not in MODES]
# Whether the replicas share elements, not the parts along a dimension.
ELEMENTS = get_engine().name != "jax"
CPUS = [f"cpu:{i}" for i in range(4)]
FEATURES, WIDTH, ROWS, BATCH = 6, 12, 29, 12  # the last batch has 5 rows


def strategy(replicas, shard):
    # What torch and TensorFlow do by themselves is not one device's.
    return ks.MirroredStrategy(CPUS[:replicas], shard=shard)


def data():
    rng = np.random.RandomState(0)
    x = rng.randn(ROWS, FEATURES).astype("float32")
    return x, x[:, :1] * 2 + rng.randn(ROWS, 1).astype("float32")


def deep(optimizer=None):
    """Dense kernels of (6, 12) and (12, 1), which 2, 3 and 4 replicas divide."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(WIDTH, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dropout(0.3, seed=3),
            layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(0.5)),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def everything():
    return deep(
        keras.optimizers.AdamW(
            0.01,
            global_clipnorm=0.1,
            use_ema=True,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=2,
        )
    )


@pytest.mark.parametrize(
    ("shape", "replicas", "dimension"),
    [
        ((6, 12), 3, 1),
        ((12, 6), 3, 0),
        ((8, 8), 4, 0),
        ((6, 12), 4, 1),
        ((4, 9), 4, 0),
        ((5, 7), 2, None),
        ((), 2, None),
        ((0, 4), 2, 1),
        ((0,), 2, None),
    ],
)
def test_sharded_dimension_choice(shape, replicas, dimension):
    assert dimension_to_shard(shape, replicas) == dimension


@pytest.mark.parametrize(
    ("shape", "replicas", "by_factors", "parts"),
    [
        ((10, 9), 6, (0, 1), 6),
        ((9, 10, 3), 6, (1, 0), 6),
        ((4, 4), 12, (0, 1, None), 4),
        ((8, 9), 24, (0, 0, 0, 1), 24),
        ((5, 4), 6, (1, None), 2),
        ((5, 7), 6, (None, None), 1),
        ((5, 7), 3, (None,), 1),
        ((), 6, (None, None), 1),
    ],
)
def test_replica_factors_shard_dimensions(shape, replicas, by_factors, parts):
    split = ShardSpec.for_shape(shape, replicas)
    assert (split.dimension, split.by_factors) == (None, by_factors)
    assert split.num_shards == parts


@pytest.mark.parametrize("shard", ["params", "none", "", True, 1])
def test_bad_argument_is_refused(shard):
    with pytest.raises(ValueError, match=r"`shard`.*'optimizer'.*'parameters'"):
        ks.MirroredStrategy(shard=shard)


@pytest.mark.skipif(not REFUSED, reason="this backend splits all there is")
def test_unsupported_sharding_is_refused():
    for shard in REFUSED:
        for replicas in (1, 2):
            with pytest.raises(UnsupportedBackendError, match="KERAS_BACKEND=jax"):
                strategy(replicas, shard)


@pytest.mark.parametrize("shard", MODES)
def test_copied_strategy_shards_alike(shard):
    made = ks.MirroredStrategy(["cpu:0", "cpu:1"], shard=shard)
    again = pickle.loads(pickle.dumps(made))
    assert again.shard == made.shard == shard
    assert again.extended.worker_devices == ("cpu:0", "cpu:1")


@pytest.fixture(scope="module")
def one():
    return alone(everything, *data(), batch_size=BATCH)


# What 4 of them share is one device's in the steps of one's own, and from a backup.
@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.needs_patch(
    "Optimizer._backend_apply_gradients",
    "Optimizer._clip_gradients",
    backend="torch",
    case="2-optimizer",
)
@pytest.mark.needs_patch(
    "Optimizer._backend_apply_gradients",
    "Optimizer._var_key",
    backend="tensorflow",
    case="2-optimizer",
)
@pytest.mark.parametrize("shard", MODES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_clipping_decay_average_and_accumulation(one, replicas, shard):
    x, y = data()
    many = train(strategy(replicas, shard), everything, x, y, BATCH)
    assert_equal(one, many)


CASES: dict[str, Case] = {
    case.name: case
    for case in [*optimizer.at_once(), *optimizer.beside_the_rule()]
    if "optimizers" in case.name
    or case.name
    in ("LossScaleOptimizer over accumulation, NaN on one replica", "mixed_float16")
}


@pytest.mark.full
@pytest.mark.needs_patch(
    "LossScaleOptimizer.check_finite", backend="torch", case="mixed_float16"
)
@pytest.mark.parametrize("name", CASES)
def test_equality_table_with_sharding(name):
    case = CASES[name]
    one = run(case, 21, None, 0, eagerly=get_engine().name == "tensorflow")
    for shard in MODES:
        many = run(case, 21, mirrored(2, shard), 0)
        assert_equal(one, many, case.weights, case.logs, case.predictions)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam(0.01),
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
        keras.optimizers.Lamb(0.01),
    ],
    ids=["elements", "norms", "weights"],
)
def test_repeated_embedding_rows(optimizer):
    """On TensorFlow an optimizer is given each of them, and squares it by itself."""
    config = optimizer.get_config()

    def make():
        words = layers.Embedding(5, 3)
        model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), words, layers.Flatten(), layers.Dense(1)]
        )
        model.compile(type(optimizer).from_config(config), "mse")
        return model

    y = data()[1]
    given = make, np.random.RandomState(0).randint(0, 5, (ROWS, 4)), y
    one = alone(*given, batch_size=BATCH)
    for shard in MODES:
        many = train(strategy(2, shard), *given, batch_size=BATCH)
        assert_equal(one, many)


@pytest.mark.needs_patch("Optimizer.add_variable", backend="jax", case="optimizer")
@pytest.mark.needs_patch(
    "Optimizer.add_variable_from_reference", backend="torch", case="optimizer"
)
@pytest.mark.parametrize("shard", [None, *MODES])
def test_bytes_per_device(shard):
    many = strategy(4, shard)
    with many.scope():
        model = deep()
        model.optimizer.build(model.trainable_variables)
    report = many.memory_report(model)
    # Kernels of (6, 12) and (12, 1), gamma and beta of 12, and a bias of 1: whole on
    # each device where one dimension is split, and else on the last one.
    split, whole = 4 * (72 + 12 + 12 + 12), 4
    parameters = [split + whole if shard != "parameters" else split // 4 + whole] * 4
    if shard == "parameters" and ELEMENTS:
        parameters = [4 * 28] * 3 + [4 * 25]  # of 109 elements
    by_elements = shard is not None and ELEMENTS
    for device, held in enumerate(report.slots):
        slots = split + whole if shard is None else split // 4 + whole
        if shard == "parameters" and ELEMENTS:
            slots = parameters[device]
        elif by_elements and device < 3:
            slots -= whole
        assert 4 < held - 2 * slots < 17  # the iterations and the learning rate
    assert report.parameters == tuple(parameters)
    paths = [v.path for v in model.optimizer.variables if v.shape == (1,)]
    if shard == "parameters" and not ELEMENTS:
        paths.append(model.trainable_variables[-1].path)
    assert report.whole == (() if shard is None or by_elements else tuple(paths))
    assert f"shard={shard!r}" in str(report)
    assert f"{parameters[0]:,}" in str(report)


def test_report_on_foreign_model_is_refused():
    model = deep()
    with pytest.raises(ValueError, match="created in the strategy's scope"):
        ks.MirroredStrategy(["cpu:0", "cpu:1"]).memory_report(model)


@pytest.mark.skipif(ELEMENTS, reason="every number of elements is split")
@pytest.mark.parametrize("shard", MODES[:1])
def test_unsharded_variables_are_logged_once(shard, caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        many = strategy(4, shard)
        with many.scope():
            model = deep()
            model.optimizer.build(model.trainable_variables)
    said = [
        r.getMessage() for r in caplog.records if "is replicated on" in r.getMessage()
    ]
    assert len(said) == 1 and "(1,)" in said[0]


def of_factors():
    """Dense kernels of which 4 replicas divide no dimension, but for that of (9, 4)."""
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(10, "tanh", use_bias=False),
            layers.Dense(9, "tanh", use_bias=False),
            layers.Dense(4, use_bias=False),
            layers.Dense(1, use_bias=False),
        ]
    )
    model.compile(optimizer, "mse")
    return model


@pytest.mark.full(keep=1)
@pytest.mark.skipif(ELEMENTS, reason="every number of elements is split")
@pytest.mark.parametrize("shard", MODES)
def test_fewer_shards_than_replicas(shard, tmp_path):
    x, y = data()
    many = strategy(4, shard)
    assert_equal(*(train(s, of_factors, x, y, BATCH) for s in (None, many)))

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = of_factors()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        replicas = strategy.num_replicas_in_sync

        def step(x, y):
            def loss():
                return keras.ops.mean((model(x) - y) ** 2) / replicas

            value, gradients = ks.value_and_grad(loss, model.trainable_variables)()
            model.optimizer.apply(gradients, model.trainable_variables)
            return value

        for batch in strategy.experimental_distribute_dataset([(x[:12], y[:12])] * 2):
            strategy.run(step, batch)
        return model

    whole = trained(ks.MirroredStrategy(CPUS[:1]))
    model = trained(many)
    for a, b in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    # (6, 10) in 2 by 2 parts, (10, 9) in 2, (9, 4) in 4, and (4, 1) in 4.
    held = 4 * (60 // 4 + 90 // 2 + 36 // 4 + 4 // 4)
    report = many.memory_report(model)
    assert all(0 < n - 3 * held < 17 for n in report.slots)
    assert report.parameters == (held if shard == "parameters" else 4 * 190,) * 4
    assert report.whole == ()
    assert set(report.partly.values()) == {2}
    assert "In fewer parts than devices" in str(report)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def lamb():
    """One of two replicas has no weight that decays, where weights have one owner."""
    optimizer = keras.optimizers.Lamb(0.01, weight_decay=0.1, clipnorm=0.1)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    return deep(optimizer)


class Own(keras.optimizers.Adam):
    """Of which nobody else knows what it computes."""


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.needs_patch("Optimizer._apply_weight_decay", backend="torch", case="Lamb")
@pytest.mark.parametrize("make", [lamb, lambda: deep(Own(0.01))], ids=["Lamb", "Own"])
def test_optimizers_that_are_not_elementwise(make):
    x, y = data()
    one = alone(make, x, y, batch_size=BATCH)
    for shard in MODES:
        if shard == "parameters" and ELEMENTS and make is not lamb:
            continue
        assert_equal(one, train(strategy(2, shard), make, x, y, BATCH))


@pytest.mark.skipif("parameters" not in MODES or not ELEMENTS, reason="any is sharded")
def test_custom_optimizer_of_sharded_weights_is_refused():
    many = strategy(2, "parameters")
    with many.scope(), pytest.raises(ValueError, match=r"Keras's optimizers.*Own"):
        model = deep(Own(0.01))
        model.optimizer.build(model.trainable_variables)


@pytest.mark.skipif(not ELEMENTS, reason="any rule's variables are split")
def test_custom_optimizer_is_not_sharded(caplog):
    many = strategy(2, "optimizer")
    with many.scope():
        model = deep(keras.optimizers.Adam(0.01))
        own = deep(type("Other", (keras.optimizers.Adam,), {})(0.01))
        for each in (model, own):
            each.optimizer.build(each.trainable_variables)
    assert not many.memory_report(model).whole
    slots = [v.path for v in own.optimizer.variables if len(v.shape)]
    assert many.memory_report(own).whole == tuple(slots)
    assert caplog.text.count("the state of the optimizer Other is not sharded") == 1


@pytest.mark.skipif(not ELEMENTS, reason="any device may apply gradients")
def test_apply_in_cross_replica_context():
    many = strategy(2, "optimizer")
    with many.scope():
        model = deep()
        model.optimizer.build(model.trainable_variables)
        before = model.get_weights()
        gradients = [keras.ops.ones(v.shape) for v in model.trainable_variables]
        with pytest.raises(RuntimeError, match=r"optimizer\.apply[\s\S]*strategy\.run"):
            model.optimizer.apply(gradients, model.trainable_variables)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("shard", MODES)
def test_optimizer_and_model_from_outside_scope(shard):
    x, y = data()
    outside = keras.optimizers.Adam(0.01)
    many = strategy(2, shard)
    with many.scope():
        model = deep(outside)
    outside.build(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    other = strategy(2, shard)
    with other.scope():
        inside = deep()
    inside.fit(x, y, batch_size=BATCH, verbose=0)
    assert many.memory_report(model).slots == other.memory_report(inside).slots


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize("shard", MODES)
def test_files_hold_full_variables(shard, tmp_path):
    x, y = data()
    many = strategy(4, shard)
    with many.scope():
        model = everything()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    weights = model.get_weights()
    state = [v.numpy() for v in model.optimizer.variables]
    assert [w.shape for w in state] == [v.shape for v in model.optimizer.variables]
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    for other in (None, strategy(3, None), strategy(3, shard)):
        with other.scope() if other else contextlib.nullcontext():
            loaded = keras.saving.load_model(tmp_path / "model.keras")
            fresh = everything()
            fresh.optimizer.build(fresh.trainable_variables)
        fresh.load_weights(tmp_path / "model.weights.h5")
        for found in (loaded, fresh):
            for a, b in zip(found.get_weights(), weights, strict=True):
                np.testing.assert_array_equal(a, b)
        for a, b in zip(loaded.optimizer.variables, state, strict=True):
            np.testing.assert_array_equal(a.numpy(), b)
    loaded.fit(x, y, batch_size=BATCH, verbose=0)
    # Of 4 slots of 436 bytes, a third but for 4 bytes of each.
    assert other.memory_report(loaded).slots[0] < 4 * (144 + 4) + 17


@pytest.mark.full
@pytest.mark.parametrize("shard", MODES)
def test_backup_resumes_with_other_replica_count(shard, tmp_path):
    x, y = data()

    def fit(replicas, epochs, *callbacks):
        keras.utils.set_random_seed(1)
        many = strategy(replicas, shard)
        with many.scope():
            model = deep()
        backup = ks.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            verbose=0,
            callbacks=[backup] if callbacks else [],
        )
        return model

    whole = fit(2, 2)
    fit(2, 1, True)
    resumed = fit(4, 2, True)
    for a, b in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("shard", MODES)
@pytest.mark.parametrize("rows", [12, 9], ids=["even", "uneven"])
def test_custom_step_with_sharding(rows, shard):
    x, y = data()
    batches = [(x[:rows], y[:rows])] * 3

    def trained(many):
        keras.utils.set_random_seed(1)
        with many.scope():
            model = everything()

        def loss(x, y):
            return keras.ops.sum((model(x, training=False) - y) ** 2) / rows

        def step(x, y):
            value, gradients = ks.value_and_grad(loss, model.trainable_variables)(x, y)
            model.optimizer.apply(gradients, model.trainable_variables)
            return value

        losses = [
            float(many.reduce("sum", many.run(step, batch), axis=None))
            for batch in many.experimental_distribute_dataset(batches)
        ]
        return model, losses

    whole, losses = trained(strategy(4, None))
    many = strategy(4, shard)
    model, found = trained(many)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    slots = zip(whole.optimizer.variables, model.optimizer.variables, strict=True)
    for a, b in slots:
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5)
    # Of 432 bytes that are split in each, and 4 that are not.
    assert many.memory_report(model).slots[0] < 4 * (108 + 4) + 17


@pytest.mark.parametrize("shard", MODES)
def test_sharded_variables_read_and_write_outside_run(shard):
    many = strategy(2, shard)
    with many.scope():
        model = deep()
        model.optimizer.build(model.trainable_variables)
    kernel = model.trainable_variables[0]
    slot = next(v for v in model.optimizer.variables if v.shape == kernel.shape)
    before = many.memory_report(model)
    for variable in (kernel, slot):
        value = np.arange(FEATURES * WIDTH, dtype="float32").reshape(FEATURES, WIDTH)
        variable.assign(value)
        for component in many.experimental_local_results(variable):
            np.testing.assert_array_equal(component, value)
        many.extended.update(variable, lambda c: c.assign_add(c.value))
        np.testing.assert_array_equal(variable.numpy(), 2 * value)
    assert many.memory_report(model) == before


@pytest.mark.parametrize("shard", [None, *MODES])
def test_deep_copies_are_independent(shard):
    x, y = data()
    many = strategy(2, shard)
    with many.scope():
        model = deep()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    kernel = model.trainable_variables[0]
    slot = next(v for v in model.optimizer.variables if v.shape == kernel.shape)
    values = [v.numpy() for v in (kernel, slot)]
    copies = [copy.deepcopy(v) for v in (kernel, slot)]
    with many.scope():
        sgd = keras.optimizers.SGD(0.25)
        sgd.build(copies[:1])

    def loss():
        return keras.ops.sum(copies[0] ** 2)  # each replica adds this gradient

    def step():
        for each in copies:
            each.assign_add(keras.ops.ones(each.shape))
        _, gradients = ks.value_and_grad(loss, copies[:1])()
        sgd.apply(gradients, copies[:1])

    for each, value in zip(copies, values, strict=True):
        np.testing.assert_array_equal(each.numpy(), value)
        each.assign(value + 1)
    many.run(step)
    for variable, value in zip((kernel, slot), values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    keras.utils.clear_session()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(copies[0].numpy(), 0, atol=1e-6)
    np.testing.assert_allclose(copies[1].numpy(), values[1] + 2, atol=1e-6)

    values = model.get_weights()
    with many.scope():
        twin = copy.deepcopy(model)
    reports = [many.memory_report(m) for m in (twin, model)]
    assert len({(r.parameters, r.slots) for r in reports}) == 1
    for a, b in zip(twin.get_weights(), values, strict=True):
        np.testing.assert_array_equal(a, b)
    twin.fit(x, y, batch_size=BATCH, verbose=0)
    for a, b in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(a, b)
