"""Several processes on JAX; `tests/distributed` has what all backends share."""

import keras
import numpy as np
import pytest

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED
from keras_strategy.testing import WorkerRunner

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX adapter", allow_module_level=True)


import contextlib
import time
from typing import Any

import jax
import keras
from keras import layers, ops

import keras_strategy as ks
from tests.distributed.jobs import in_turns, make_strategy


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
    """Read predictions, logs and variables in the ways of Keras's loop."""
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


def late_gradient() -> np.ndarray:
    """Return weights whose gradient the second worker has 40 s after the first."""
    strategy = make_strategy(shard="optimizer")
    rank = strategy.extended.local_replicas.start

    def wait(x):
        time.sleep(40 * rank)
        return x

    with strategy.scope():
        weight = keras.Variable(np.zeros(8, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step():
        gradient = ops.arange(8, dtype="float32")
        optimizer.apply([jax.pure_callback(wait, gradient, gradient)], [weight])

    strategy.run(step)
    return np.asarray(weight)


@pytest.fixture(scope="module", params=[2, 1], ids=["2x2", "2x1"])
def results(request, starter):
    """Return the results of two workers with a number of devices."""
    calls = {fn.__name__: (fn, {}) for fn in (uneven_rows, merged)}
    if request.param == 2:
        calls["keras_models"] = (keras_models, {})
    with WorkerRunner(2, request.param, timeout_seconds=300, starter=starter) as runner:
        found = runner.run(in_turns, calls)
    return {name: [of[name] for of in found] for name in calls}


@pytest.fixture
def two_workers(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        yield runner


def equal(one, other):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, other
    )


@pytest.mark.full(keep=1)
@pytest.mark.needs_patch(
    "keras.src.backend.jax.distribution_lib.distribute_tensor",
    backend="jax",
    case="2x1",
)
def test_replicas_of_different_shapes(results):
    results = results["uneven_rows"]
    n = sum(len(result["value"]) for result in results)
    ids = np.arange(n, dtype="float32")
    rows = np.repeat(ids, np.arange(n) + 1)[:, None] * np.ones(2, "float32")
    for result in results:
        equal(result["gathered"], rows)
        equal(result["mean"], rows.mean(axis=0))
        for value, every in zip(result["value"], result["rows"], strict=True):
            equal(value, 2 * rows.sum() + 2 * n)
            equal(every, rows)
        # Of the sum over the replicas of what each computed.
        assert result["variables"] == [ids.sum(), 5, ids.mean(), 6 + ids.sum()]
    parts = [part for result in results for part in result["parts"]]
    equal(parts, list(6 / n + ids))
    gradients = [g for result in results for g in result["gradient"]]
    equal(gradients, [n * 2 * (i + 1) * i + n for i in range(n)])


@pytest.mark.full(keep=1)
def test_run_accepts_functions_of_all_replicas(results):
    results = results["merged"]
    n = sum(len(result["local"]) for result in results)
    for result in results:
        last = (1 + 2 * n) * 4 + 2
        assert result["seen"] == [1 + n, 1 + 2 * n, (1 + 2 * n) * 2, last]
        assert all(part == last for part in result["local"])
        assert result["traced"] == 3
        assert result["mixed"] == [2 * n] * 3


@pytest.mark.parametrize("results", [2], ids=["2x2"], indirect=True)
def test_keras_reads_local_values(results):
    """One device each fits in the tests of `tests/distributed`."""
    expected = keras_models(alone=True)
    for result in results["keras_models"]:
        equal(result, expected)


def test_used_devices_are_refused(two_workers):
    two_workers.start(too_late)
    ends = two_workers.wait()
    for end in ends:
        assert "before the first tensor" in end.output
    # Each raises; who does so second may have been told of the first.
    assert {1} <= {end.exit_status for end in ends} <= {1, EXIT_OTHER_WORKER_FAILED}


@pytest.mark.full
def test_sharded_update_waits_for_a_slow_worker(two_workers):
    """For longer than gloo waits in a reduce-scatter, and in the first collective."""
    for weight in two_workers.run(late_gradient):
        equal(weight, -2 * np.arange(8, dtype="float32"))
