"""Sharded weights on torch: programs that use torch itself, errors and memory."""

import contextlib
import gc
import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

import keras_strategy as ks  # noqa: E402
from keras_strategy.audit import policy  # noqa: E402
from keras_strategy.backends.torch import patches_optimizers, sharding  # noqa: E402
from keras_strategy.keras_patches.internals import stored_value  # noqa: E402
from keras_strategy.testing import WorkerRunner  # noqa: E402
from tests.backends import torch_sharding_jobs as jobs  # noqa: E402

CPUS = [f"cpu:{index}" for index in range(4)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Let a few weights fill a unit."""
    monkeypatch.setattr(sharding, "UNIT_BYTES", jobs.UNIT_BYTES)


def strategy(replicas: int = 2, **options) -> ks.MirroredStrategy:
    return ks.MirroredStrategy(CPUS[:replicas], shard="parameters", **options)


@pytest.fixture(scope="module")
def one_device():
    return {name: jobs.train(name, None) for name in jobs.PROGRAMS}


@pytest.mark.needs_patch("Layer._post_track_variable", backend="torch", case="2-LoRA")
@pytest.mark.parametrize("name", jobs.PROGRAMS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_programs_equal_one_device(name, replicas, one_device):
    weights = jobs.train(name, strategy(replicas))
    for a, b in zip(one_device[name], weights, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def assert_equal_programs(found, one_device):
    assert found.keys() == one_device.keys()
    for name, weights in found.items():
        for a, b in zip(one_device[name], weights, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_of_workers_equal_one_device(devices, one_device, starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for found in runner.run(jobs.train_all, devices):
            assert_equal_programs(found, one_device)


def test_prefetched_units_equal_one_device(one_device, starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for found, read, prefetched, left in runner.run(jobs.train_all_with_prefetch):
            assert_equal_programs(found, one_device)
            assert read > prefetched > read / 2
            assert left == 0


def test_workers_that_read_other_units_than_were_prefetched_fail(starter):
    with WorkerRunner(2, timeout_seconds=60, starter=starter) as runner:
        for message in runner.run(jobs.read_other_units):
            assert "different" in message, message


def test_gpus_gather_the_same_rows_as_cpus(starter):
    with WorkerRunner(2, timeout_seconds=60, starter=starter) as runner:
        first, second = runner.run(jobs.gather_in_both_ways)
    for (exchanged, gathered), (other, _) in zip(first, second, strict=True):
        assert exchanged.dtype == gathered.dtype and len(gathered) in (0, 2, 4)
        torch.testing.assert_close(gathered, exchanged, rtol=0, atol=0)
        torch.testing.assert_close(other, exchanged, rtol=0, atol=0)


@pytest.mark.needs_patch("TorchParallelOptimizer._backend_update_step", backend="torch")
def test_optimizer_updates_few_shards_at_a_time(monkeypatch):
    sizes = []
    cls = type(keras.optimizers.RMSprop())
    update = cls._parallel_update_step

    def recorded(self, grads, *args):
        sizes.append([gradient.nbytes for gradient in grads])
        update(self, grads, *args)

    def train(many):
        with many.scope() if many else contextlib.nullcontext():
            keras.utils.set_random_seed(1)
            model = jobs.dense(keras.optimizers.RMSprop(0.01))
        fit(model)
        return model.get_weights()

    expected = train(None)
    monkeypatch.setattr(cls, "_parallel_update_step", recorded)
    monkeypatch.setattr(patches_optimizers, "UNIT_BYTES", jobs.UNIT_BYTES)
    for a, b in zip(expected, train(strategy()), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert all(sum(group[:-1]) < jobs.UNIT_BYTES for group in sizes)
    assert any(len(group) > 1 for group in sizes)


def made(many, model=jobs.dense):
    with many.scope():
        return model()


def fit(model):
    model.fit(jobs.X, jobs.Y, batch_size=jobs.BATCH, shuffle=False, verbose=0)


def with_step(step):
    """Return a model whose training step ends with `step(model, loss)`."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.dense = layers.Dense(4), layers.Dense(3)

        def call(self, x):
            return self.dense(self.hidden(x))

        def train_step(self, data):
            x, y = data
            loss = ops.mean((self(x, training=True) - y) ** 2)
            self.zero_grad()
            step(self, loss)
            return {"loss": loss}

    def make():
        model = Model()
        model(jobs.X)
        model.compile("sgd")
        return model

    return made(strategy(), make)


def clip_by_hand(model, loss):
    loss.backward()
    gradients = [torch.clamp(v.value.grad, -1, 1) for v in model.trainable_variables]
    model.optimizer.apply(gradients, model.trainable_variables)


def write_in_place(model, loss):
    with torch.no_grad():
        model.dense.kernel.value.mul_(0.5)


def use_torch_optimizer(model, loss):
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def assign_before_backward(model, loss):
    model.dense.kernel.assign(model.dense.kernel * 0.5)
    loss.backward()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (clip_by_hand, "`clamp` needs a whole gradient.*`global_clipnorm`"),
        (write_in_place, r"`mul_`.*'\w+/dense\w*/kernel'.*`variable\.assign"),
        (use_torch_optimizer, r"needs a whole gradient.*`optimizer\.apply`"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_steps_that_need_whole_weights_are_refused(step, message):
    model = with_step(step)
    before = model.get_weights()
    with pytest.raises(RuntimeError, match=message):
        fit(model)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layer_that_changes_a_weight_in_place_is_refused():
    class Scaled(layers.Dense):
        def call(self, x):
            with torch.no_grad():
                self.kernel.value.mul_(0.5)
            return super().call(x)

    def make():
        model = keras.Sequential([keras.Input((6,)), Scaled(3)])
        model.compile("sgd", "mse")
        return model

    model = made(strategy(), make)
    with pytest.raises(RuntimeError, match=r"in place.*`variable\.assign.*kernel"):
        model.predict(jobs.X, verbose=0)


@pytest.mark.needs_patch("Layer.state_dict", "Layer.load_state_dict", backend="torch")
def test_state_dict_is_refused():
    model = made(strategy())
    with pytest.raises(RuntimeError, match="`state_dict`.*`save_weights`"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="`load_state_dict`.*`load_weights`"):
        model.load_state_dict({})


def test_compilation_is_refused():
    model = made(strategy())
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True.*shard='optimizer'"):
        fit(model)


def test_own_reduction_is_refused():
    class Own(ks.CrossDeviceOps):
        def reduce_implementation(self, *args):
            raise NotImplementedError

    with pytest.raises(ValueError, match="`cross_device_ops`.*shard='optimizer'"):
        strategy(cross_device_ops=Own())


def storages(model):
    """Return the bytes of what a model's weights have in memory."""
    tensors = [stored_value(variable) for variable in model.trainable_variables]
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_weights_are_never_whole(monkeypatch):
    monkeypatch.setattr(sharding, "UNIT_BYTES", 100_000)
    alive, most = {}, [0]
    gather = sharding.WeightUnit.gather

    def count(unit, *args):
        """Note the bytes of gathered units that anything refers to."""
        flat = gather(unit, *args)
        alive[flat.untyped_storage().data_ptr()] = (
            sharding.StorageWeakRef(flat.untyped_storage()),
            flat.nbytes,
        )
        gc.collect()
        sizes = [size for reference, size in alive.values() if not reference.expired()]
        most[0] = max(most[0], sum(sizes))
        return flat

    monkeypatch.setattr(sharding.WeightUnit, "gather", count)

    def make():
        hidden = [layers.Dense(160, "tanh") for _ in range(10)]
        model = keras.Sequential([keras.Input((160,)), *hidden])
        model.compile("adam", "mse")
        return model

    model = made(strategy(), make)
    unit = 160 * 161 * 4
    assert storages(model) == [4] * 20
    assert model.count_params() * 4 == 10 * unit
    model.summary(print_fn=lambda text: None)
    assert most[0] == 0
    x = np.ones((4, 160), "float32")
    model.fit(x, x, verbose=0)
    assert unit <= most[0] <= 3 * unit  # the current one, and those that layers hold
    assert storages(model) == [4] * 20


def test_weights_are_sharded_before_the_scope_ends():
    with strategy().scope():
        model = keras.Sequential([keras.Input((20,)), layers.Dense(20)])
        assert max(storages(model)) > 4
        layers.Dense(20).build((None, 20))
        assert storages(model) == [4, 4]


def test_layers_from_outside_of_the_scope_form_units(one_device):
    keras.utils.set_random_seed(1)
    outside = jobs.dense()

    def make():
        return jobs.compiled(
            keras.Sequential(outside.layers), keras.optimizers.SGD(0.1)
        )

    model = made(strategy(), make)
    model.fit(jobs.X, jobs.Y, batch_size=jobs.BATCH, epochs=2, shuffle=False, verbose=0)
    units = {id(sharding.unit_of(variable)) for variable in model.trainable_variables}
    assert len(units) == 3  # of 336, 416 and 36 bytes
    for a, b in zip(one_device["no slots"], model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_gradients_outside_of_runs_are_whole():
    many = strategy()
    model, other = made(many), jobs.dense()
    other.set_weights(model.get_weights())
    x = torch.tensor(jobs.X)
    for each in model, other:
        ops.sum(each(x) ** 2).backward()
    for a, b in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_allclose(a.value.grad, b.value.grad, atol=1e-5)


def test_gradient_of_a_step_is_not_added_to():
    model = made(strategy())
    fit(model)
    loss = ops.sum(model(jobs.X))
    with pytest.raises(RuntimeError, match=r"kernel'|bias'.*`model\.zero_grad"):
        loss.backward()
    model.zero_grad()
    ops.sum(model(jobs.X)).backward()
    assert float(ops.sum(model.layers[0].kernel.value.grad)) != 0


def test_assignments_in_run_are_seen_by_all_replicas():
    model = made(strategy())
    layer = model.layers[0]
    before = layer.kernel.numpy()

    def step(x):
        first = layer(x)
        layer.kernel.assign(layer.kernel * 2)
        return first, layer(x), ops.sum(layer.kernel)

    many = model.layers[0].kernel._ks_strategy
    x = np.ones((1, 6), "float32")
    first, second, total = many.run(step, args=(x,))
    for replica in range(2):
        np.testing.assert_allclose(
            second.values[replica].detach(), layer(x).detach(), rtol=1e-5
        )
        assert not np.allclose(first.values[replica].detach(), layer(x).detach())
        assert float(total.values[replica]) == pytest.approx(2 * before.sum(), rel=1e-4)
    np.testing.assert_allclose(layer.kernel.numpy(), 2 * before, rtol=1e-6)


def test_different_assignments_are_refused():
    model = made(strategy())
    kernel = model.layers[0].kernel
    before = kernel.numpy()

    def step():
        replica = ks.get_replica_context().replica_id_in_sync_group
        kernel.assign(kernel + replica)

    with pytest.raises(
        ks.errors.MirrorError, match=r"dense\w*/kernel'.*`.*all_reduce`"
    ):
        kernel._ks_strategy.run(step)
    np.testing.assert_array_equal(kernel.numpy(), before)


@pytest.mark.parametrize("shard", [None, "parameters"])
def test_weight_of_another_strategy_is_refused(shard):
    model = made(strategy())
    with pytest.raises(ValueError, match="sharded by another strategy"):
        ks.MirroredStrategy(CPUS, shard=shard).run(lambda: model.layers[0].kernel + 1)


def test_weights_are_read_in_the_scope_that_makes_them():
    many = strategy()
    with many.scope():
        model = jobs.dense()
        before = model.get_weights()
        model.optimizer.build(model.trainable_variables)
    assert all(np.isfinite(array).all() for array in before)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def compare_rows(x):
    """Return outputs that depend on the other rows of the batch."""
    return x / (1 + ops.max(ops.abs(x)))


def with_row_dependence():
    hidden = layers.Dense(12, compare_rows), layers.Dense(1)
    return jobs.compiled(keras.Sequential([keras.Input((6,)), *hidden]))


def test_audit_leaves_sharded_weights_as_they_were():
    model = made(strategy(), with_row_dependence)
    before = model.get_weights()
    report = ks.verify(model, jobs.X, jobs.Y)
    assert report.differs  # so that it changed the weights, to measure rounding
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("limit", [0, 1000])
def test_first_step_of_a_large_model_is_not_audited(limit, monkeypatch, caplog):
    monkeypatch.setattr(policy, "MAX_SHARDED_BYTES", limit)
    model = made(strategy(), with_row_dependence)
    with caplog.at_level(logging.INFO, "keras_strategy"):
        fit(model)
    assert ("is not audited" in caplog.text) == (limit == 0)
    assert ("differs from one device" in caplog.text) == (limit > 0)


def test_failed_run_changes_nothing():
    model = made(strategy())
    before = model.get_weights()
    many = model.layers[0].kernel._ks_strategy

    def step():
        for variable in model.trainable_variables:
            variable.assign(variable * 2)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        many.run(step)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_backward_after_an_assignment_is_refused():
    model = with_step(assign_before_backward)
    with pytest.raises(RuntimeError, match="dense.*/kernel' before it was assigned"):
        fit(model)
