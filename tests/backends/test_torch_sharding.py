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

from typing import Any  # noqa: E402

import keras_strategy as ks  # noqa: E402
from keras_strategy.audit import policy  # noqa: E402
from keras_strategy.backends.torch import patches_optimizers, sharding  # noqa: E402
from keras_strategy.backends.torch.gradient_buckets import FlatBufferPool  # noqa: E402
from keras_strategy.keras_patches.internals import stored_value  # noqa: E402
from keras_strategy.testing import WorkerRunner  # noqa: E402

UNIT_BYTES = 300
BATCH = 12  # the last batch has 5 rows
X = np.random.RandomState(0).randn(29, 6).astype("float32")
Y = X[:, :1] * 2


def compiled(model: keras.Model, optimizer: Any = None) -> keras.Model:
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def dense(optimizer: Any = None) -> keras.Model:
    hidden = layers.Dense(12, "relu"), layers.Dense(8, "tanh")
    return compiled(
        keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1)]), optimizer
    )


def values_and_variables(model: keras.Model) -> tuple[list, list]:
    variables = list(model.trainable_variables)
    return [variable.value for variable in variables], variables


class Stepping(keras.Model):
    """A model with a training step of its own, and one layer that is called often."""

    def __init__(self):
        super().__init__()
        self.shared, self.out = layers.Dense(6, "tanh"), layers.Dense(1)
        self.compile(keras.optimizers.Adam(0.01), "mse")

    def call(self, x):
        for _ in range(3):
            x = self.shared(x)
        return self.out(x)

    def train_step(self, data):
        x, y = data
        loss = ops.mean((self(x, training=True) - y) ** 2)
        self.zero_grad()
        self.differentiate(loss, x, y)
        return {"loss": loss}

    def differentiate(self, loss, x, y):
        loss.backward()
        self.apply()

    def apply(self):
        values, variables = values_and_variables(self)
        self.optimizer.apply([value.grad for value in values], variables)


class Penalized(Stepping):
    def differentiate(self, loss, x, y):
        squares = [ops.sum(variable**2) for variable in self.trainable_variables]
        super().differentiate(loss + 0.01 * sum(squares), x, y)


class TwoPasses(Stepping):
    def differentiate(self, loss, x, y):
        other = ops.mean(ops.abs(self(x) - y))
        loss.backward()
        other.backward()
        self.apply()


class Retained(Stepping):
    def differentiate(self, loss, x, y):
        loss.backward(retain_graph=True)
        loss.backward()
        self.apply()


class WholeGradients(Stepping):
    def differentiate(self, loss, x, y):
        values, variables = values_and_variables(self)
        gradients = torch.autograd.grad(loss, values)
        self.optimizer.apply([2 * gradient for gradient in gradients], variables)


class Adversarial(keras.Model):
    """Two models with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((6,)), layers.Dense(6)])
        self.judge = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, "relu"), layers.Dense(1)]
        )
        self.of_maker = keras.optimizers.Adam(0.01)
        self.of_judge = keras.optimizers.SGD(0.1)
        self.compile(loss="mse")

    def call(self, x):
        return self.judge(self.maker(x))

    def train_step(self, data):
        x, _ = data
        losses = {}
        for name, model, optimizer, target in (
            ("judge", self.judge, self.of_judge, 1.0),
            ("maker", self.maker, self.of_maker, 0.0),
        ):
            loss = ops.mean((self(x, training=True) - target) ** 2)
            if model is self.judge:
                loss = loss + ops.mean(model(x) ** 2)
            self.zero_grad()
            loss.backward()
            values, variables = values_and_variables(model)
            optimizer.apply([value.grad for value in values], variables)
            losses[name] = loss
        return losses


class Tied(keras.Model):
    """A model that reads a layer's weight in its own call."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = layers.Dense(4, use_bias=False), layers.Dense(1)
        self.inner.build((None, 6))

    def call(self, x):
        return self.out(ops.matmul(self.inner(x), ops.transpose(self.inner.kernel)))


def recurrent() -> keras.Model:
    parts = layers.Reshape((3, 2)), layers.LSTM(5), layers.Dense(1)
    return compiled(keras.Sequential([keras.Input((6,)), *parts]))


def rematerialized() -> keras.Model:
    with keras.RematScope(mode="full"):
        return dense()


def frozen() -> keras.Model:
    model = dense()
    model.layers[0].trainable = False
    return compiled(model)


def adapted() -> keras.Model:
    model = dense()
    model.layers[0].enable_lora(2)
    return compiled(model)


def of_module() -> keras.Model:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh())
    wrapped = layers.TorchModuleWrapper(module)
    return compiled(keras.Sequential([keras.Input((6,)), wrapped, layers.Dense(1)]))


def constrained() -> keras.Model:
    hidden = layers.Dense(12, "relu", kernel_constraint="max_norm")
    out = layers.Dense(1, kernel_constraint="unit_norm", kernel_regularizer="l2")
    return compiled(keras.Sequential([keras.Input((6,)), hidden, out]))


def normalized() -> keras.Model:
    """Return a model with a layer that assigns its weight in each call."""
    hidden = layers.SpectralNormalization(layers.Dense(12, "relu"))
    return compiled(keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)]))


PROGRAMS = {
    "a custom step": Stepping,
    "a penalty of weights": Penalized,
    "two backward passes": TwoPasses,
    "a graph that is kept": Retained,
    "torch.autograd.grad": WholeGradients,
    "two models": Adversarial,
    "a tied weight": lambda: compiled(Tied()),
    "an LSTM": recurrent,
    "rematerialization": rematerialized,
    "frozen weights": frozen,
    "LoRA": adapted,
    "a torch module": of_module,
    "constraints": constrained,
    "assignments in calls": normalized,
    "no slots": lambda: dense(keras.optimizers.SGD(0.1)),
    "Muon": lambda: dense(keras.optimizers.Muon(0.01)),
}


def train(name: str, strategy: Any) -> list[np.ndarray]:
    """Train a program and return its weights."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = PROGRAMS[name]()
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def workers_strategy(bytes_per_pack: int = 0) -> ks.MultiWorkerMirroredStrategy:
    sharding.UNIT_BYTES = UNIT_BYTES
    options = ks.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    return ks.MultiWorkerMirroredStrategy(
        shard="parameters", communication_options=options
    )


def train_all(devices: int) -> dict[str, list[np.ndarray]]:
    """Train all programs with several workers of some devices each."""
    ks.config.set_logical_devices("cpu", devices)
    strategy = workers_strategy()
    return {name: train(name, strategy) for name in PROGRAMS}


def train_all_with_prefetch() -> tuple[dict[str, list[np.ndarray]], int, int, int]:
    """Train all programs; return how many units were read and prefetched."""
    # The last number is of the units that are left of a program that has ended.
    read, prefetched = [], []
    take = sharding.UnitPrefetch.take

    def counted(self, unit, dtype):
        started = take(self, unit, dtype)
        read.append(unit.number)
        prefetched.extend([unit.number] * (started is not None))
        return started

    sharding.UnitPrefetch.take = counted
    ks.config.audit("off")  # what an audit reads is not prefetched
    strategy = workers_strategy(bytes_per_pack=1000)
    found = {name: train(name, strategy) for name in PROGRAMS}
    counts = len(read), len(prefetched)
    train("two models", strategy)
    gc.collect()
    existing = [x for x in gc.get_objects() if isinstance(x, sharding.WeightUnit)]
    left = {unit.number for unit in existing} & set(read[counts[0] :])
    return found, *counts, len(left)


def read_other_units() -> str:
    """Run a step in which worker 1 reads another layer than the one before."""
    strategy = workers_strategy(bytes_per_pack=1000)
    with strategy.scope():
        parts = [layers.Dense(9) for _ in range(4)]
        for index in range(4):
            parts[index].build((None, 9))

    def step(order):
        for index in order:
            parts[index](ops.ones((1, 9)))

    for _ in range(3):
        strategy.run(step, ([0, 1, 2],))
    is_second = strategy.cluster_resolver.task_id == 1
    # Worker 1 deletes a layer late, which came next in the last run.
    strategy.run(step, ([0, 1, 3],))
    deleted = parts[3:] if is_second else []
    parts[3:] = [layers.Dense(9)]
    with strategy.scope():
        parts[3].build((None, 9))
    gc.collect()
    strategy.run(step, ([0, 1],))
    strategy.run(step, ([0, 1, 2],))
    del deleted
    try:
        strategy.run(step, ([0, 3 if is_second else 1, 2],))
    except RuntimeError as error:
        return str(error)
    return ""


def gather_in_both_ways() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Joins rows of workers as CPUs do, and as GPUs do."""
    workers: Any = ks.MultiWorkerMirroredStrategy().extended.group.workers
    pairs = []
    for counts in ([2, 2], [3, 1], [1, 3], [0, 2]):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            size = 2 * counts[workers.rank]
            rows = torch.arange(size).view(-1, 2).to(dtype) + workers.rank
            by_exchange = workers.gather_rows("rows", rows, counts)
            pool = FlatBufferPool()
            works, join = workers._start_padded_gather(rows, counts, pool)
            for work in works:
                work.wait()
            pairs.append((by_exchange, join().view(by_exchange.shape)))
    empty = torch.zeros(0, 2)
    return [*pairs, (workers.gather_rows("no rows", empty, [0, 0]), empty)]


CPUS = [f"cpu:{index}" for index in range(4)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Let a few weights fill a unit."""
    monkeypatch.setattr(sharding, "UNIT_BYTES", UNIT_BYTES)


def strategy(replicas: int = 2, **options) -> ks.MirroredStrategy:
    return ks.MirroredStrategy(CPUS[:replicas], shard="parameters", **options)


@pytest.fixture(scope="module")
def one_device():
    return {name: train(name, None) for name in PROGRAMS}


@pytest.mark.needs_patch("Layer._post_track_variable", backend="torch", case="2-LoRA")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_programs_equal_one_device(name, replicas, one_device):
    weights = train(name, strategy(replicas))
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
        for found in runner.run(train_all, devices):
            assert_equal_programs(found, one_device)


def test_prefetched_units_equal_one_device(one_device, starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        for found, read, prefetched, left in runner.run(train_all_with_prefetch):
            assert_equal_programs(found, one_device)
            assert read > prefetched > read / 2
            assert left == 0


def test_workers_that_read_other_units_than_were_prefetched_fail(starter):
    with WorkerRunner(2, timeout_seconds=60, starter=starter) as runner:
        for message in runner.run(read_other_units):
            assert "different" in message, message


def test_gpus_gather_the_same_rows_as_cpus(starter):
    with WorkerRunner(2, timeout_seconds=60, starter=starter) as runner:
        first, second = runner.run(gather_in_both_ways)
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
            model = dense(keras.optimizers.RMSprop(0.01))
        fit(model)
        return model.get_weights()

    expected = train(None)
    monkeypatch.setattr(cls, "_parallel_update_step", recorded)
    monkeypatch.setattr(patches_optimizers, "UNIT_BYTES", UNIT_BYTES)
    for a, b in zip(expected, train(strategy()), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert all(sum(group[:-1]) < UNIT_BYTES for group in sizes)
    assert any(len(group) > 1 for group in sizes)


def made(many, model=dense):
    with many.scope():
        return model()


def fit(model):
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)


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
        model(X)
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
        model.predict(X, verbose=0)


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
    outside = dense()

    def make():
        return compiled(keras.Sequential(outside.layers), keras.optimizers.SGD(0.1))

    model = made(strategy(), make)
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    units = {id(sharding.unit_of(variable)) for variable in model.trainable_variables}
    assert len(units) == 3  # of 336, 416 and 36 bytes
    for a, b in zip(one_device["no slots"], model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_gradients_outside_of_runs_are_whole():
    many = strategy()
    model, other = made(many), dense()
    other.set_weights(model.get_weights())
    x = torch.tensor(X)
    for each in model, other:
        ops.sum(each(x) ** 2).backward()
    for a, b in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_allclose(a.value.grad, b.value.grad, atol=1e-5)


def test_gradient_of_a_step_is_not_added_to():
    model = made(strategy())
    fit(model)
    loss = ops.sum(model(X))
    with pytest.raises(RuntimeError, match=r"kernel'|bias'.*`model\.zero_grad"):
        loss.backward()
    model.zero_grad()
    ops.sum(model(X)).backward()
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
        model = dense()
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
    return compiled(keras.Sequential([keras.Input((6,)), *hidden]))


def test_audit_leaves_sharded_weights_as_they_were():
    model = made(strategy(), with_row_dependence)
    before = model.get_weights()
    report = ks.verify(model, X, Y)
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
