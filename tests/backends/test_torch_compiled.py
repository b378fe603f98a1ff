"""`jit_compile` on torch: what is compiled, what is not, and that both are exact."""

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import largest, scope

if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

import torch  # noqa: E402

from keras_strategy.backends.torch import compilation  # noqa: E402

try:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
except torch._dynamo.exc.Unsupported as error:  # Keras 3.13 with torch 2.13
    pytest.skip(f"torch cannot trace this Keras: {error}", allow_module_level=True)

X = np.random.RandomState(0).randn(14, 6).astype("float32")
TOKENS = np.random.RandomState(0).randint(0, 5, (14, 6)).astype("int32")
Y = np.random.RandomState(1).randn(14, 2).astype("float32")
SEQUENCES = np.random.RandomState(2).randn(14, 6, 2).astype("float32")


class Adds(layers.Layer):
    """Adds a loss."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


class Counts(layers.Layer):
    """Counts batches in a variable."""

    def build(self, shape):
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * self.count


class Remembers(layers.Layer):
    """Sets an attribute, which is each replica's own."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


class Branches(layers.Layer):
    """Looks at its inputs."""

    def call(self, x):
        return x if float(ops.mean(x)) > 1e6 else 2 * x


def sequential(*middle):
    dense = layers.Dense(8, "tanh")
    return keras.Sequential([keras.Input((6,)), dense, *middle, layers.Dense(2)])


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(5, 4)(tokens)
    x = layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(2)(x))


def masked():
    """Its loss is of the entries that its embedding does not mask."""
    embedding = layers.Embedding(5, 4, mask_zero=True)
    return keras.Sequential([keras.Input((6,)), embedding, layers.Dense(2)])


def in_bfloat16():
    dense = layers.Dense(8, "tanh", dtype="mixed_bfloat16")
    return keras.Sequential([keras.Input((6,)), dense, layers.Dense(2)])


def recurrent():
    return keras.Sequential([keras.Input((6, 2)), layers.LSTM(3), layers.Dense(2)])


@pytest.fixture
def told(caplog):
    """Return the warnings of `jit_compile`."""
    caplog.set_level(logging.INFO, "keras_strategy")

    def lines():
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.startswith("jit_compile=True")]

    return lines


@pytest.fixture
def local():
    """Two replicas; a graph cannot communicate."""
    return ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics="local")


def dropping(**options):
    """It draws twice from one generator."""
    layer = layers.Dropout(0.5, **options)
    return sequential(layer, layers.Dense(4), layer)


def fitted(strategy, build, x=X, y=Y, jit_compile=True, loss="mse", **compiling):
    """The losses and the weights after an epoch of `fit`."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = build()
        # Plain Keras compiles the whole step, for half a minute.
        jit_compile = jit_compile and strategy is not None
        model.compile("adam", loss, jit_compile=jit_compile, **compiling)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [*history.history["loss"], *model.get_weights()]


def test_compiled_model_equals_one_device(two, told):
    def results(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = dropping()
            model.compile(
                "adam", "mse", metrics=["mae"], jit_compile=strategy is not None
            )
        weights = np.linspace(0.5, 2, 13)
        # 5 rows are left: 3 and 2; then 1 and a row that stands in.
        kwargs = dict(batch_size=8, verbose=0)
        fit = model.fit(X[:13], Y[:13], sample_weight=weights, shuffle=False, **kwargs)
        evaluated = model.evaluate(X[:9], Y[:9], **kwargs)
        predicted = model.predict(X[:9], **kwargs)
        on_batch = model.train_on_batch(X[:1], Y[:1])
        history = [fit.history["loss"], fit.history["mae"]]
        return [*history, *evaluated, *on_batch, predicted, *model.get_weights()], model

    found, model = results(two)
    assert largest(found, results(None)[0]) < 1e-6
    # Once, though fit and evaluate have each their own. Predictions have no loss.
    step, forward = told()
    assert "the forward pass with loss and metrics of 'sequential" in step
    assert "the forward pass of 'sequential" in forward
    for line in step, forward:
        assert "is one graph of torch.compile, backend 'eager'" in line
        assert "without" not in line
    assert "call" not in vars(model)


@pytest.mark.full(keep=1)
@pytest.mark.needs_patch(
    "backends.torch.patches_compiled keras.src.backend.torch.random.dropout",
    backend="torch",
    case="dropout",
)
@pytest.mark.needs_patch(
    "backends.torch.patches_compiled Layer.add_loss", backend="torch", case="adds"
)
@pytest.mark.needs_patch(
    "keras.src.backend.torch.nn._can_use_flash_attention",
    backend="torch",
    case="attention",
)
@pytest.mark.needs_patch(
    "keras.src.backend.torch.nn.moments", backend="torch", case="norm"
)
@pytest.mark.parametrize(
    "build, x, y, eager",
    [
        (lambda: sequential(layers.BatchNormalization()), X, Y, ""),
        (dropping, X, Y, ""),
        (lambda: dropping(seed=3, noise_shape=(None, 1)), X, Y, ""),
        (lambda: sequential(Adds(), Counts()), X, Y, "it adds a loss in a layer"),
        (attention, TOKENS, Y, ""),
        (masked, TOKENS, SEQUENCES, "it reads `all_reduce` of a replica"),
        (in_bfloat16, X, Y, ""),
        (recurrent, SEQUENCES, Y, ""),
    ],
    ids=[
        "norm",
        "dropout",
        "seeded",
        "adds",
        "attention",
        "masked",
        "bfloat16",
        "recurrent",
    ],
)
def test_step_is_compiled(build, x, y, eager, local, told):
    """To the last digit what it is without a graph: also what it draws."""
    expected = fitted(local, build, x, y, jit_compile=False)
    assert not told()
    assert largest(fitted(local, build, x, y), expected) == 0
    (line,) = told()
    assert "is one graph" in line
    if eager:  # of the loss alone
        assert "the forward pass of '" in line
        assert "with the same results: the loss and metrics of '" in line
        assert eager in line
    else:
        assert "the forward pass with loss and metrics of '" in line
        assert "without" not in line


@pytest.mark.full
def test_per_replica_random_numbers_stay_in_graph(two, told):
    ks.config.exact_random(False)
    try:
        expected = fitted(two, dropping, jit_compile=False)
        assert largest(fitted(two, dropping), expected) == 0
    finally:
        ks.config.exact_random(True)
    assert "without" not in told()[0]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "build, x, why",
    [
        (lambda: sequential(Remembers()), X, "it sets Remembers.calls"),
        (lambda: sequential(Branches()), X, "Could not guard on data-dependent"),
        (
            lambda: sequential(layers.BatchNormalization()),
            X,
            "it reads the row weight of a replica",
        ),
        (lambda: sequential(layers.GaussianNoise(0.5)), X, "random numbers"),
    ],
    ids=["attribute", "branch", "normalizes", "draws"],
)
def test_unsupported_models_are_not_compiled(build, x, why, two, told):
    expected = fitted(two, build, x, jit_compile=False)
    assert largest(fitted(two, build, x), expected) == 0
    (line,) = told()
    assert "without a graph, and with the same results" in line and why in line


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiler_backend_is_respected(backend, local, told, monkeypatch):
    def build():
        return sequential(layers.BatchNormalization(), layers.Dropout(0.5))

    expected = fitted(local, build, X[:8], Y[:8], jit_compile=False)
    monkeypatch.setenv("KERAS_STRATEGY_TORCH_COMPILE_BACKEND", backend)
    assert largest(fitted(local, build, X[:8], Y[:8]), expected) < 1e-6
    assert f"backend '{backend}'" in told()[0]


def test_graph_limit_falls_back_to_eager(two, told, monkeypatch):
    """Each of the two devices has one: of some rows, and of any number but 1."""
    torch._dynamo.reset()  # it remembers which dimensions changed in other models
    monkeypatch.setattr(compilation, "MAX_GRAPHS", 1)
    with two.scope():
        model = sequential()
        model.compile("sgd", "mse", jit_compile=True)
    for rows in (8, 6, 10, 2, 12):
        found = model.predict(X[:rows], batch_size=rows, verbose=0)
        np.testing.assert_allclose(found, model(X[:rows]).detach(), atol=1e-6)
    graph, limit = told()
    assert "is one graph" in graph and "without" not in graph
    assert "the limit of torch.compile" in limit and "is one graph" in limit


def test_compiler_failure_falls_back_to_eager(two, told, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler")

    torch._dynamo.register_backend(broken, name="broken")
    expected = fitted(two, sequential, jit_compile=False)
    monkeypatch.setenv("KERAS_STRATEGY_TORCH_COMPILE_BACKEND", "broken")
    assert largest(fitted(two, sequential), expected) == 0
    assert "no compiler" in told()[0]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(
            1e-2, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
        ),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
            momentum=0.9,
            gradient_accumulation_steps=2,
        ),
        lambda: keras.optimizers.Lion(1e-3, clipvalue=0.1),
    ],
    ids=["adamw", "accumulating", "lion"],
)
def test_optimizers_of_compiled_steps(optimizer, two, told):
    """Also where the last batch is uneven, or has rows for one replica alone."""

    def results(jit_compile):
        keras.utils.set_random_seed(1)
        with two.scope():
            model = sequential()
            model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
            # It reads the row weight.
            loss = keras.losses.MeanSquaredError(reduction="sum")
            model.compile(optimizer(), loss, metrics=["mae"], jit_compile=jit_compile)
        found = []
        for rows in (13, 11):
            fit = model.fit(X[:rows], Y[:rows], batch_size=4, shuffle=False, verbose=0)
            found += [*fit.history["loss"], *fit.history["mae"]]
        state = [v.numpy() for v in model.optimizer.variables]
        return [*found, *model.get_weights(), *state]

    assert largest(results(True), results(False)) == 0
    (line,) = told()
    assert "with loss and metrics" in line and "without" not in line


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("branches", [False, True])
def test_uncompiled_loss_falls_back_to_forward_pass(branches, two, told):
    def loss(y, y_pred):
        error = ops.mean(ops.square(y - y_pred), axis=-1)
        return error if branches and float(ops.max(error)) > 1e6 else 2 * error

    expected = fitted(two, sequential, jit_compile=False, loss=loss)
    assert largest(fitted(two, sequential, loss=loss), expected) == 0
    (line,) = told()
    if branches:
        assert "the forward pass of 'sequential" in line
        assert "with the same results: the loss and metrics of 'sequential" in line
    else:
        assert "with loss and metrics" in line and "without" not in line


def test_other_step_of_keras_is_called(two, told, monkeypatch):
    """As of a later Keras, whose step does more than the graph would."""
    keras_step, called = keras.Model.train_step, []

    def train_step(self, data):
        called.append(data)
        return keras_step(self, data)

    monkeypatch.setattr(keras.Model, "train_step", train_step)
    with two.scope():
        model = sequential()
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(X[:12], Y[:12], batch_size=4, verbose=0)
    assert len(called) >= 3 * 2  # each replica in each step
    assert "the forward pass of 'sequential" in told()[0]


def test_changed_attributes_are_compiled_again(two, told):
    class Scales(layers.Layer):
        factor = 2.0

        def call(self, x):
            return x * self.factor

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.layers[1].factor = float(batch)

    def weights(jit_compile):
        keras.utils.set_random_seed(1)
        with two.scope():
            model = sequential(Scales())
            model.compile("sgd", "mse", jit_compile=jit_compile)
        model.fit(X[:12], Y[:12], batch_size=4, verbose=0, callbacks=[Change()])
        return model.get_weights()

    assert largest(weights(True), weights(False)) == 0
    assert "without" not in told()[0]


@pytest.mark.full
def test_frozen_model_is_not_minimized(two, told):
    with two.scope():
        model = sequential()
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    model.trainable = False
    before = model.get_weights()
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert largest(model.get_weights(), before) == 0
    assert "without" not in told()[0]


class Twins(keras.Model):
    """Its steps call its parts, one of them several times, and it has no `call`."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = sequential(), sequential()
        # Of what `maker` makes, `judge` takes as much as it can.
        self.widen = layers.Dense(6, trainable=False)
        self.widen.build((None, 2))
        self.built = True

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        made = self.maker(x, training=True)
        loss = ops.mean(ops.square(self.judge(self.widen(made)) - y))
        loss = loss + ops.mean(ops.square(self.judge(x) - made))
        loss.backward()
        variables = self.trainable_variables
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"loss": loss}


def test_submodels_are_compiled(two, told):
    expected = fitted(two, Twins, jit_compile=False, loss=None)
    assert largest(fitted(two, Twins, loss=None), expected) == 0
    (line,) = told()
    assert line.count("'sequential") == 2


@pytest.mark.full
def test_recompiles_after_freezing(two, told):
    def trained(jit_compile):
        keras.utils.set_random_seed(1)
        with two.scope():
            model = sequential()
        for trainable in (False, True):
            model.layers[0].trainable = trainable
            with two.scope():
                model.compile("sgd", "mse", jit_compile=jit_compile)
            model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
        return model.get_weights()

    assert largest(trained(True), trained(False)) == 0
    assert len(told()) == 1


def test_model_error_is_reraised(two, told):
    class Raises(keras.Model):
        def call(self, x):
            if x.shape[0] == 3:
                raise KeyError("mine")
            return ops.mean(x, axis=1, keepdims=True)

    with two.scope():
        model = Raises()
        model.compile("sgd", "mse", jit_compile=True)
    assert model.predict(X[:8], verbose=0).shape == (8, 1)
    with pytest.raises(KeyError, match="mine"):
        model.predict(X[:6], verbose=0)
    assert "call" not in vars(model)


def test_run_eagerly_is_not_compiled(two, told, monkeypatch):
    def compile_(*_, **__):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", compile_)
    expected = fitted(two, sequential, jit_compile=False)
    with pytest.warns(UserWarning, match="run_eagerly"):
        found = fitted(two, sequential, run_eagerly=True)
    assert largest(found, expected) == 0
    outside = sequential()
    outside.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(AssertionError, match="was called"):
        outside.make_train_function()  # Keras's own
    assert not told()
