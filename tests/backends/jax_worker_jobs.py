"""What workers do in the tests of the JAX adapter."""

import contextlib
from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks


def numpy_of(structure: Any) -> Any:
    """The structure with NumPy arrays for tensors."""
    return keras.tree.map_structure(np.asarray, structure)


def uneven_rows() -> dict:
    """Replica i has i + 1 rows: no one program serves them."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rows = strategy.experimental_distribute_values_from_function(
        lambda c: np.full(
            (c.replica_id_in_sync_group + 1, 2), c.replica_id_in_sync_group, "float32"
        )
    )
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")
        first = keras.Variable(0.0, aggregation="only_first_replica")
        mean = keras.Variable(0.0, aggregation="mean", synchronization="on_read")
        parts = keras.Variable(6.0, aggregation="sum", synchronization="on_read")
        weight = keras.Variable(2.0)

    def step(x):
        context = ks.get_replica_context()
        number = ops.cast(context.replica_id_in_sync_group, "float32")
        total.assign_add(number)
        first.assign(number + 5.0)
        mean.assign(number)
        parts.assign_add(number)

        def loss(x):
            every = context.all_gather(x * weight, axis=0)
            return ops.sum(every) + ops.sum(context.all_reduce("sum", weight))

        value, (gradient,) = ks.value_and_grad(loss, [weight])(x)
        return value, gradient, context.all_gather(x, axis=0)

    def local(value):
        return numpy_of(strategy.experimental_local_results(value))

    value, gradient, every = strategy.run(step, args=(rows,))
    return {
        "value": local(value),
        "gradient": local(gradient),
        "rows": local(every),
        "gathered": np.asarray(strategy.gather(rows, axis=0)),
        "mean": np.asarray(strategy.reduce("mean", rows, axis=0)),
        "variables": [float(v) for v in (total, first, mean, parts)],
        "parts": local(parts),
    }


def merged() -> dict:
    """A function of all replicas, compiled and not, and updates outside."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = keras.Variable(1.0)

    def add(strategy, x):
        total = strategy.extended.reduce_to("sum", x, destinations=v)
        strategy.extended.update(v, lambda c, t: c.assign_add(t), args=(total,))

    def step():
        ks.get_replica_context().merge_call(add, args=(ops.ones(()),))

    seen = []
    for compile in (True, False):
        strategy.run(step, options=ks.RunOptions(compile=compile))
        seen.append(float(v))
    strategy.extended.update(v, lambda c: c.assign(c.value * 2.0))
    seen.append(float(v))
    # Values of the variable's devices, of this process's and of none.
    v.assign(v * strategy.reduce("mean", np.float32(2.0)) + ops.ones(()) + 1)
    seen.append(float(v))
    local = numpy_of(strategy.experimental_local_results(v))
    return {"seen": seen, "local": local, "traced": traced(v), "mixed": mixed(strategy)}


def traced(variable: keras.Variable) -> float:
    """Return the result of a program that distributes a tensor to all workers."""
    layout = variable.value.sharding
    place = jax.jit(lambda x: keras.distribution.distribute_tensor(x, layout))
    return float(np.asarray(place(np.float32(3)).addressable_data(0)))


def mixed(strategy: ks.Strategy) -> list[float]:
    """Call `run` with a program's output on one worker, plain values on the other."""
    value = strategy.run(lambda: ops.ones(()))
    if strategy.cluster_resolver.task_id == 1:
        value = ks.PerReplica(list(strategy.experimental_local_results(value)))

    def double(x):
        return 2 * x

    return [
        float(strategy.reduce("sum", strategy.run(double, args=(value,))))
        for _ in range(3)
    ]


class Own(keras.Model):
    """A model that is built late, and whose step returns a row's worth of logs."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        """Two layers with a normalization between them."""
        return self.out(self.norm(self.hidden(x), training=training))

    def train_step(self, state, data):  # pyright: ignore
        """Keras's, with the targets among the logs."""
        logs, state = super().train_step(state, data)  # pyright: ignore
        return {**logs, "targets": data[1]}, state


def keras_models(alone: bool = False) -> dict:
    """What Keras's loop reads: predictions, logs, variables, in several ways."""
    scope = contextlib.nullcontext()
    if not alone:
        scope = ks.MultiWorkerMirroredStrategy().scope()
    keras.utils.set_random_seed(5)
    x = np.random.RandomState(0).randn(22, 4).astype("float32")
    y = x[:, :1] * 2
    with scope:
        model = Own()
        built_late = Own()
        eager = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("adam", "mse", steps_per_execution=2)
        built_late.compile("adam", "mse")
        eager.compile("sgd", "mse", run_eagerly=True)
    seen = []

    class Targets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.asarray((logs or {})["targets"]))

    model.fit(x, y, batch_size=6, epochs=2, verbose=0, callbacks=[Targets()])
    eager.fit(x, y, batch_size=6, verbose=0)
    return {
        "seen": seen,
        "weights": [*model.get_weights(), *eager.get_weights()],
        "predicted": model.predict(x, batch_size=12, verbose=0),
        "built_late": built_late.predict(x, batch_size=6, verbose=0),
        # Not of `model`: Keras 3.16 takes a batch for two of them there.
        "on_batch": [
            built_late.predict_on_batch(x[:5]),
            built_late.test_on_batch(x, y),
        ],
        "called": np.asarray(model(x)),
    }


def too_late() -> None:
    """The strategy is made after a tensor."""
    ops.ones(())
    ks.MultiWorkerMirroredStrategy()
