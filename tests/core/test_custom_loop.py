"""Custom training loops equal one device, also for uneven batches."""

import functools

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training.row_weights import split_rows
from tests.core.apis import results

X = np.random.RandomState(0).randn(13, 3).astype("float32")
Y = np.random.RandomState(1).randn(13, 1).astype("float32")
BATCH = 4  # the last batch has one row


def split(strategy, array):
    """The rows of a global batch, dealt to the replicas."""
    parts = split_rows(len(array), strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda c: keras.ops.convert_to_tensor(
            array[slice(*parts[c.replica_id_in_sync_group])]
        )
    )


class Loop:
    """A model, an optimizer and a metric that only the first step builds."""

    def __init__(self, strategy, lazy):
        keras.utils.set_random_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model = keras.Sequential(
                [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
            )
            self.optimizer = keras.optimizers.Adam(0.05)
            self.metric = keras.metrics.Mean()
            if not lazy:
                self.model.build((None, 3))
                self.optimizer.build(self.model.trainable_variables)

    def step(self, x, y, rows):
        self.model(x)  # which builds it, where it is not
        variables = self.model.trainable_variables

        def loss():
            losses = keras.ops.sum((self.model(x) - y) ** 2, axis=-1)
            return ks.compute_average_loss(losses, global_batch_size=rows), losses

        (loss, losses), gradients = ks.value_and_grad(loss, variables, has_aux=True)()
        self.optimizer.apply(gradients, variables)
        self.metric.update_state(losses)
        return loss

    def epoch(self, order):
        losses = []
        for begin in order:
            x, y = X[begin : begin + BATCH], Y[begin : begin + BATCH]
            loss = self.strategy.run(
                self.step, (split(self.strategy, x), split(self.strategy, y), len(x))
            )
            losses.append(float(self.strategy.reduce("SUM", loss)))
        return losses

    def weights(self):
        values = [*self.model.get_weights(), float(self.metric.result())]
        return values + [np.array(v) for v in self.optimizer.variables]


# The batch that the replicas divide least comes last, or first.
ORDERS = {"partial last": [0, 4, 8, 12], "partial first": [12, 0, 4, 8]}


def two_epochs(strategy, order, lazy=False):
    """The losses of each epoch, and the weights after them."""
    loop = Loop(strategy, lazy)
    return [loop.epoch(ORDERS[order]) for _ in range(2)], loop.weights()


@functools.cache
def on_one_device(order):
    return two_epochs(ks.OneDeviceStrategy("cpu:0"), order)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("order", "lazy", "replicas"),
    [
        ("partial last", False, 2),
        ("partial last", False, 4),
        ("partial first", False, 3),
        ("partial last", True, 3),
        ("partial first", True, 4),
    ],
)
def test_custom_loop_equals_one_device(order, lazy, replicas, mirrored):
    losses, weights = two_epochs(mirrored(replicas), order, lazy)
    one_losses, one_weights = on_one_device(order)
    np.testing.assert_allclose(losses, one_losses, atol=1e-5)
    for a, b in zip(one_weights, weights, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5)


def test_custom_loop_equals_fit(mirrored):
    loop = Loop(mirrored(3), lazy=False)
    loop.epoch(ORDERS["partial last"])
    fitted = Loop(mirrored(3), lazy=False)
    with fitted.strategy.scope():
        fitted.model.compile(fitted.optimizer, "mse")
    fitted.model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(loop.model.get_weights(), fitted.model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5)


def test_uneven_rows_are_weighted(mirrored):
    strategy = mirrored(3)
    rows = np.arange(4, dtype="float32")  # two, two and none

    def step(x):
        context = ks.get_replica_context()
        return (
            keras.ops.sum(x),
            context.all_reduce("SUM", keras.ops.sum(x)),
            context.all_gather(x, axis=0),
        )

    own, total, everything = strategy.run(step, (split(strategy, rows),))
    assert results(strategy, own) == [1.0, 5.0, 0.0]
    assert results(strategy, total) == [6.0] * 3
    assert results(strategy, everything) == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_gradients_of_uneven_collectives(mirrored):
    """d(v) of replica r: every replica's 2 * total * x summed, x's own rows."""
    strategy = mirrored(3)
    with strategy.scope():
        v = keras.Variable(3.0)
    rows = np.arange(1, 5, dtype="float32")

    def step(x):
        context = ks.get_replica_context()

        def reduced():
            return context.all_reduce("SUM", keras.ops.sum(x * v)) ** 2

        def gathered():
            return keras.ops.sum(context.all_gather(x * v, axis=0) ** 2)

        return [ks.value_and_grad(f, [v])()[1][0] for f in (reduced, gathered)]

    by_sum, by_rows = strategy.run(step, (split(strategy, rows),))
    total = 3.0 * rows.sum()
    sums = [2 * total * part.sum() * 3 for part in np.split(rows, [2, 4])]
    np.testing.assert_allclose(results(strategy, by_sum), sums, rtol=1e-6)
    squares = [2 * 3.0 * (part**2).sum() * 3 for part in np.split(rows, [2, 4])]
    np.testing.assert_allclose(results(strategy, by_rows), squares, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "synchronization", "expected", "components"),
    [
        ("none", "auto", None, [3.0, 7.0, 0.0]),
        ("sum", "auto", 10.0, [10.0] * 3),
        ("mean", "auto", 10.0 / 3, [10.0 / 3] * 3),
        ("only_first_replica", "auto", 3.0, [3.0] * 3),
        ("sum", "on_read", 10.0, [3.0, 7.0, 0.0]),
        ("mean", "on_read", 10.0 / 3, [3.0, 7.0, 0.0]),
    ],
)
def test_uneven_replicas_assign_variables(
    aggregation, synchronization, expected, components, mirrored
):
    strategy = mirrored(3)
    with strategy.scope():
        v = keras.Variable(
            1.0,
            aggregation=aggregation,
            synchronization=synchronization,
            trainable=False,
        )
    rows = np.arange(1, 5, dtype="float32")
    strategy.run(lambda x: v.assign(keras.ops.sum(x)), (split(strategy, rows),))
    np.testing.assert_allclose(results(strategy, v), components, rtol=1e-6)
    if expected is not None:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(v), expected, rtol=1e-6)


def test_error_in_uneven_replica_changes_nothing(mirrored):
    strategy = mirrored(3)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parts = split(strategy, X[:4])

    def step(x):
        v.assign(5.0)
        model(x)
        if x.shape[0] == 0:
            raise ArithmeticError("no rows")
        return keras.ops.sum(x)

    with pytest.raises(ArithmeticError, match="no rows"):
        strategy.run(step, (parts,))
    assert results(strategy, v) == [1.0] * 3
    assert strategy.run(lambda x: int(x.shape[0]), (parts,)).values == (2, 2, 0)


def test_merge_call_with_uneven_replicas(mirrored):
    strategy = mirrored(3)

    def step(x):
        def merge(strategy, rows):
            assert ks.in_cross_replica_context()
            return strategy.reduce("MEAN", rows, axis=0)

        return ks.get_replica_context().merge_call(merge, args=(x,))

    rows = np.arange(4, dtype="float32")
    means = strategy.run(step, (split(strategy, rows),))
    assert results(strategy, means) == [1.5] * 3


def test_dropout_with_uneven_replicas(mirrored):
    strategy = mirrored(3)
    rows = np.ones((38, 8), "float32")  # 13, 13 and 12

    def drawn():
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=4)
        out = strategy.run(lambda x: layer(x, training=True), (split(strategy, rows),))
        states = strategy.experimental_local_results(layer.seed_generator.state)
        return results(strategy, out), [keras.ops.convert_to_numpy(s) for s in states]

    (first, states), (again, _) = drawn(), drawn()
    assert first == again
    assert first[0] != first[1] and first[1][:12] != first[2]
    for state in states:
        np.testing.assert_array_equal(state, states[0])


@pytest.mark.parametrize("lazy", [False, True], ids=["built", "lazily built"])
def test_numpy_arrays_are_tensors_in_run(lazy, two):
    loop = Loop(two, lazy)
    two.run(loop.step, (X, Y, 2 * len(X)))
    assert int(loop.optimizer.iterations) == 1
