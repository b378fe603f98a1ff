"""Programs that train with torch's own functions, and what workers do with them."""

import contextlib
import gc
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.backends.torch import sharding
from keras_strategy.backends.torch.gradient_buckets import FlatBufferPool

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
    "a step of one's own": Stepping,
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
