"""Methods of the replica context, in `run` and in layers, losses and metrics."""

import functools

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import assert_equal, train
from tests.core.apis import per_replica, results

X = np.random.RandomState(0).randn(21, 3).astype("float32")
Y = np.random.RandomState(1).randn(21, 1).astype("float32")
context = ks.get_replica_context


def test_replica_context_properties(two):
    def ask():
        c = context()
        return c.num_replicas_in_sync, c.strategy is two, c is context(), c.devices

    replicas, strategy, same, devices = two.run(ask)
    assert (replicas, strategy, same) == (2, True, True)
    if keras.backend.backend() == "jax":
        assert devices == ("cpu:0", "cpu:1")
    else:
        assert devices[0].values == ("cpu:0", "cpu:1")
    one = ks.OneDeviceStrategy("cpu:1")
    assert one.run(lambda: context().devices) == ("cpu:1",)


def test_collectives_of_structures_and_numbers(two):
    x = per_replica(two, [1, 2], [3, 5])

    def ask(x):
        c = context()
        return c.all_reduce("sum", {"k": x, "l": [x * 2]}), c.all_reduce("SUM", 1.0)

    nested, number = two.run(ask, args=(x,))
    assert results(two, nested["k"]) == [[4.0, 7.0]] * 2
    assert results(two, nested["l"][0]) == [[8.0, 14.0]] * 2
    assert results(two, number) == [2.0, 2.0]
    gathered = two.run(lambda x: context().all_gather([x], axis=-1), args=(x,))
    assert results(two, gathered[0]) == [[1.0, 2.0, 3.0, 5.0]] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce("SUM", 1.0),
        lambda c: c.all_gather(np.ones(1), axis=0),
        lambda c: c.merge_call(lambda strategy: None),
    ],
    ids=["all_reduce", "all_gather", "merge_call"],
)
def test_collectives_outside_replica_are_refused(call, two):
    kept = []
    two.run(lambda: kept.append(context()))
    for place in (two.scope(), ks.OneDeviceStrategy("cpu:0").scope()):
        with place, pytest.raises(RuntimeError, match="outside its replica"):
            call(kept[0])
    with pytest.raises(RuntimeError, match="outside its replica"):
        call(kept[0])

    def fn():
        c = context()
        return c.merge_call(lambda strategy: call(c))

    with pytest.raises(RuntimeError, match="outside its replica"):
        two.run(fn)


def test_bad_collectives_are_refused(two):
    value = ks.PerReplica([1.0, 2.0])

    def refused(error, match, call):
        with pytest.raises(error, match=match):
            two.run(lambda: call(context()))

    refused(ValueError, "reduce_op='max'", lambda c: c.all_reduce("max", 1.0))
    refused(
        TypeError,
        "must be `ks.experimental.CommunicationOptions`",
        lambda c: c.all_reduce("SUM", 1.0, options=3),
    )
    refused(TypeError, "Received: 3 of", lambda c: c.all_gather(np.ones(1), 0, 3))
    refused(ValueError, "not a distributed", lambda c: c.all_reduce("SUM", [value]))
    refused(ValueError, "rank 1 or more", lambda c: c.all_gather(np.float32(1), 0))
    refused(ValueError, "axis=1", lambda c: c.all_gather(np.ones(2), axis=1))
    refused(ValueError, "axis='a'", lambda c: c.all_gather(np.ones(2), axis="a"))
    refused(TypeError, "`merge_fn` must be", lambda c: c.merge_call(3))
    assert two.run(lambda: 1) == 1


def test_replica_context_outside_scopes():
    assert float(context().all_reduce("mean", 3.0)) == 3.0
    assert list(context().all_gather(np.ones(2), axis=0)) == [1.0, 1.0]
    assert context().merge_call(lambda s, x: x + 1, args=(1,)) == 2
    with pytest.raises(ValueError, match="rank 1 or more"):
        context().all_gather(np.float32(3.0), axis=0)


# --- in what Keras calls


def total_over_replicas(tensor):
    """As users write it: where there are no replicas, the rows are all there."""
    replica = ks.get_replica_context()
    return tensor if replica is None else replica.all_reduce("SUM", tensor)


class Centered(keras.layers.Layer):
    """Subtracts the mean of the global batch, and is differentiable."""

    def call(self, x):
        rows = keras.ops.sum(keras.ops.ones_like(x[:, :1]))
        total = total_over_replicas(keras.ops.sum(x, axis=0, keepdims=True))
        return x - total / total_over_replicas(rows)


class CountsRows(keras.metrics.Metric):
    """Counts the rows of every batch, on all replicas at once."""

    def __init__(self):
        super().__init__(name="rows")
        # Every replica adds the rows of all.
        self.rows = self.add_variable(
            (), "zeros", name="rows", aggregation="only_first_replica"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.sum(keras.ops.ones_like(y_pred[:, 0]))
        self.rows.assign_add(total_over_replicas(rows))

    def result(self):
        return self.rows.value


def relative_error(y_true, y_pred):
    """A loss of every row, divided by the spread over the global batch."""
    rows = total_over_replicas(keras.ops.sum(keras.ops.ones_like(y_true)))
    spread = total_over_replicas(keras.ops.sum(keras.ops.abs(y_true))) / rows
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1) / spread


def of_ones_own():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            Centered(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), relative_error, metrics=[CountsRows()])
    return model


@functools.cache
def on_one_device():
    return train(None, of_ones_own, X, Y)


def test_collectives_in_layers_losses_and_metrics(replicas, mirrored):
    """Also for the last batch of 5 rows, of which the fourth replica gets none."""
    assert_equal(on_one_device(), train(mirrored(replicas), of_ones_own, X, Y))


def test_mean_in_fit_excludes_empty_replicas(mirrored):
    strategy = mirrored(4)

    class Mean(keras.layers.Layer):
        def call(self, x):
            replica = ks.get_replica_context()
            if replica is None:
                return x * 0.0 + keras.ops.mean(x)
            return x * 0.0 + replica.all_reduce("MEAN", keras.ops.mean(x))

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Mean()])
    x = np.arange(3.0, dtype="float32")[:, None] * np.ones((1, 3), "float32")
    seen = model.predict(x, verbose=0)
    np.testing.assert_allclose(seen, np.ones((3, 3)), rtol=1e-6)


if keras.backend.backend() != "jax":  # whose train_step has another signature

    class OwnStep(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.replicas = []

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            replica = ks.get_replica_context()
            self.replicas.append(replica.num_replicas_in_sync)
            x, y = data
            rows = replica.all_reduce("SUM", keras.ops.sum(keras.ops.ones_like(y)))

            def loss():
                return keras.ops.mean(keras.ops.square(self(x) - y))

            value, gradients = ks.value_and_grad(loss, self.trainable_variables)()
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"value": value, "rows": rows}

    def test_collectives_in_custom_train_step(two, audit_mode):
        audit_mode("off")  # the step leaves other numbers in `replicas` than one device

        def trained(strategy):
            keras.utils.set_random_seed(1)
            model = OwnStep()
            model.compile(keras.optimizers.SGD(0.1))
            logs = model.fit(X, Y, batch_size=21, shuffle=False, verbose=0).history
            return model, logs

        one, one_logs = trained(None)
        with two.scope():
            mine, my_logs = trained(two)
        assert set(one.replicas) == {1} and set(mine.replicas) == {2}
        assert one_logs["rows"] == my_logs["rows"] == [21.0]
        np.testing.assert_allclose(one_logs["value"], my_logs["value"], rtol=1e-5)
        for a, b in zip(one.get_weights(), mine.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
