"""What the torch adapter does beside what all backends do."""

import threading

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.errors import KerasVersionError
from tests.equality.compare import largest, scope

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from keras_strategy.backends.torch.gradient_buckets import (  # noqa: E402
    FlatBufferPool,
    unflatten,
    write_weighted,
)

X = np.random.RandomState(0).randn(10, 3).astype("float32")
Y = np.random.RandomState(1).randn(10, 1).astype("float32")


@pytest.fixture
def process_group():
    """torch.distributed, initialised with this process alone."""
    distributed = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model_of(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def results(model):
    fit = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(X, Y, batch_size=4, verbose=0)
    prediction = model.predict(X, batch_size=4, verbose=0)
    return [*fit.history["loss"], *evaluated, prediction, *model.get_weights()]


def wrapped_in(model):
    wrapper = torch.nn.parallel.DistributedDataParallel
    return [name for name, value in vars(model).items() if isinstance(value, wrapper)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_does_not_wrap_our_models(replicas, process_group, monkeypatch):
    expected = results(model_of(None))

    def all_reduce(*args, **kwargs):
        raise AssertionError("Keras reduced over the processes")

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    strategy = (
        ks.OneDeviceStrategy("cpu:0")
        if replicas == 1
        else ks.MirroredStrategy(["cpu:0", "cpu:1"])
    )
    model = model_of(strategy)
    assert largest(expected, results(model)) < 2e-5
    assert wrapped_in(model) == []


def test_keras_wraps_models_outside_strategies(process_group, two):
    # `two` has installed the hooks, which must leave such a model to Keras.
    model = model_of(None)
    results(model)
    if not hasattr(model, "_initialize_ddp"):
        pytest.skip("this Keras leaves torch.distributed to its user")
    assert wrapped_in(model) == ["ddp_model"]


def test_wrapped_model_is_refused(process_group, two):
    model = model_of(two)
    wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    vars(model)["parallel_model"] = wrapper
    with pytest.raises(KerasVersionError, match="Model.parallel_model"):
        model.fit(X, Y, verbose=0)


class Residual(torch.nn.Module):
    """A module of torch's own, with a buffer that it may count in."""

    def __init__(self, normalizes, counts):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.normalize = torch.nn.BatchNorm1d(3) if normalizes else torch.nn.Tanh()
        self.register_buffer("calls", torch.zeros(()))
        self.counts = counts

    def forward(self, x):
        if self.counts:
            self.calls += len(x)
        return x + self.normalize(self.linear(x))


class OfAModule(keras.Model):
    """A model with a call of its own."""

    def __init__(self, *parts):
        super().__init__()
        self.body = keras.Sequential(parts)

    def call(self, x, training=None):
        return self.body(x, training=training)


def model_of_a_module(strategy, normalizes=False, counts=False, own=False):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        module = Residual(normalizes, counts)
        wrapped = keras.layers.TorchModuleWrapper(module, output_shape=(None, 3))
        parts = [keras.Input((3,)), wrapped, keras.layers.Dense(1)]
        model = OfAModule(*parts) if own else keras.Sequential(parts)
        model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("replicas", [2, 3])
def test_torch_modules_match_one_device(replicas, mirrored):
    strategy = mirrored(replicas)
    expected = results(model_of_a_module(None))
    model = model_of_a_module(strategy)
    assert largest(expected, results(model)) < 2e-5
    for variable in model.variables:
        components = strategy.experimental_local_results(variable)
        assert all(torch.equal(components[0], other) for other in components)


@pytest.mark.parametrize("own", [False, True])
def test_module_statistics_are_averaged(own, two):
    model = model_of_a_module(two, normalizes=True, own=own)
    module = (model.body if own else model).layers[0].module
    with torch.no_grad():
        inputs = module.linear(torch.from_numpy(X[:5]))
    model.train_on_batch(X[:5], Y[:5])
    expected = 0.1 * (3 / 5 * inputs[:3].mean(0) + 2 / 5 * inputs[3:].mean(0))
    statistics = module.normalize
    assert largest([expected.numpy()], [statistics.running_mean.numpy()]) < 1e-6
    assert int(statistics.num_batches_tracked) == 1
    before = statistics.running_mean.clone()
    model.evaluate(X, Y, verbose=0)
    assert torch.equal(before, statistics.running_mean)


@pytest.mark.needs_patch("TorchModuleWrapper.call", backend="torch")
def test_counting_module_is_refused(two, audit_mode):
    audit_mode("off")  # or the step would run whole
    model = model_of_a_module(two, counts=True)
    with pytest.raises(ValueError, match="The buffer 'calls' of a Residual changes"):
        model.fit(X, Y, verbose=0)


def test_reused_memory_is_copied():
    buffers = FlatBufferPool()

    def join(parts):
        buffer = buffers.take(5, parts[0])
        write_weighted(buffer, parts, None)
        return buffer

    def address(parts):
        return join(parts).data_ptr()

    parts = [torch.ones(2), torch.zeros(3, 1)]
    with torch.inference_mode():
        address(parts)  # nobody else may write to what is made here
    with torch.no_grad():
        first = join(parts)
        assert first.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
        seen = unflatten(first, parts)
        assert [part.shape for part in seen] == [(2,), (3, 1)]
        kept = first.data_ptr()
        del first
        assert address(parts) != kept  # it is looked into
        del seen
        again = address(parts)
        assert address(parts) == again


def test_torch_module_refuses_global_batch_statistics():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics="global")
    model = model_of_a_module(strategy, normalizes=True)
    with pytest.raises(ValueError, match="'normalize' of a Residual"):
        model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)  # by what it keeps


def test_dry_run_does_not_call_torch_modules(two):
    """What it keeps could not be put back."""
    kept = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), two):
        keras.utils.set_random_seed(3)
        module = torch.nn.BatchNorm1d(4, affine=False, momentum=None)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.TorchModuleWrapper(module),
                    keras.layers.Dropout(0.3, seed=1),
                    keras.layers.Dense(2),
                ]
            )
            model.compile("sgd", "mse")
        rows = np.arange(8.0, dtype="float32").repeat(4).reshape(8, 4)
        model.fit(rows, rows[:, :2], batch_size=8, shuffle=False, verbose=0)
        kept.append(int(module.num_batches_tracked))
    assert kept[0] == kept[1]


class OwnOptimizer(keras.Model):
    """Has an optimizer of torch's apply the gradients, or writes to the tensors."""

    def __init__(self, by_rows):
        super().__init__()
        self.by_rows, self.out = by_rows, keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        x, y = data
        if self.by_rows:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
            loss.backward()
            optimizer.step()
        else:
            for variable in self.trainable_variables:
                with torch.no_grad():
                    variable.value.mul_(0.5)
        return {}


@pytest.mark.parametrize("by_rows", [True, False])
def test_tensor_writes_in_a_step_are_reported(by_rows, two, audit_mode):
    """An optimizer of torch's knows one replica's tensors, and its gradients alone."""
    audit_mode("off")  # or the step would run whole
    with two.scope():
        model = OwnOptimizer(by_rows)
        model(np.zeros((1, 4), "float32"))
        model.compile()
    kernel = model.out.kernel.numpy()
    x = np.random.RandomState(1).randn(7, 4).astype("float32")
    if by_rows:
        with pytest.raises(ks.errors.MirrorError, match=r"optimizer\.apply\(gradients"):
            model.fit(x, x[:, :1], batch_size=7, verbose=0)
        return
    model.fit(x, x[:, :1], batch_size=7, verbose=0)
    for component in two.experimental_local_results(model.out.kernel):
        np.testing.assert_allclose(component, kernel / 2)


class RecordsThreads(keras.losses.MeanSquaredError):
    def __init__(self):
        super().__init__()
        self.threads = []

    def call(self, y_true, y_pred):
        self.threads.append(threading.current_thread())
        return super().call(y_true, y_pred)


def test_replicas_of_fit_run_in_calling_thread(two):
    loss = RecordsThreads()
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", loss)
    here = threading.current_thread()
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert set(loss.threads) == {here}
    model.fit(X, Y, batch_size=4, verbose=0)  # it finds out what steps exchange
    loss.threads.clear()
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert len(loss.threads) >= 12
    assert set(loss.threads) == {here}


class Steps(keras.metrics.Metric):
    """Counts steps, and sums over the replicas from some step on."""

    def __init__(self, first):
        super().__init__(name="steps")
        self.steps = self.add_weight(shape=(), initializer="zeros")
        self.first, self.seen = first, 0

    def update_state(self, *args, **kwargs):
        one, replica = keras.ops.ones(()), ks.get_replica_context()
        self.seen += replica is not None
        if self.seen > self.first:
            one = replica.all_reduce("MEAN", one)
        self.steps.assign_add(one)

    def result(self):
        return self.steps


def test_step_that_begins_to_reduce_is_refused(two, audit_mode):
    audit_mode("off")  # or the step would run whole

    def fit(first):
        with two.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=[Steps(first)])
        history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history
        return history["steps"]

    assert fit(first=0) == fit(first=99)
    with pytest.raises(RuntimeError, match="calls `all_reduce` after"):
        fit(first=4)


class ReducesLate(keras.optimizers.SGD):
    """Also calls a collective, from its third update on."""

    updates = 0

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        self.updates += ks.get_replica_context().replica_id_in_sync_group == 0
        if self.updates > 2:
            ks.get_replica_context().all_reduce("MEAN", keras.ops.ones(()))


def make_scaled_sgd():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


@pytest.mark.parametrize(
    ("shard", "make", "plain"),
    [
        (None, lambda: ReducesLate(0.1), lambda: keras.optimizers.SGD(0.1)),
        ("optimizer", make_scaled_sgd, make_scaled_sgd),
    ],
    ids=["own optimizer", "shards"],
)
def test_optimizer_that_begins_to_exchange(shard, make, plain):
    targets = Y.copy()
    if shard is not None:
        targets[0] = np.inf  # the first update is left out

    def fit(strategy, make):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile(make(), "mse")
        model.fit(X, targets, batch_size=4, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    many = fit(ks.MirroredStrategy(["cpu:0", "cpu:1"], shard=shard), make)
    one = fit(ks.OneDeviceStrategy("cpu:0"), plain)
    for expected, value in zip(one, many, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


class Unfreeze(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = epoch > 0


class CustomStep(keras.Sequential):
    """Its replicas have threads, since a step of the user's may do anything."""

    def train_step(self, data):
        return super().train_step(data)


def test_unfrozen_statistics_are_averaged(two):
    def fit(kind):
        keras.utils.set_random_seed(1)
        with two.scope():
            model = kind([keras.Input((3,)), keras.layers.BatchNormalization()])
            model.compile("sgd", "mse")
        model.fit(*(X, Y), batch_size=4, epochs=3, verbose=0, callbacks=[Unfreeze()])
        return model.get_weights()

    expected = fit(CustomStep)
    assert abs(expected[2]).max() > 0
    assert all(map(np.array_equal, expected, fit(keras.Sequential)))
