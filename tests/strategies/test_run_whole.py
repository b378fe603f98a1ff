"""`RunOptions(whole=True)`: a function of `run` is called once, on all rows."""

import keras
import pytest
from keras import ops

import keras_strategy as ks
from conformance import models
from conformance.compare import largest, scope

X, _ = models.regression(13)
WHOLE = ks.RunOptions(whole=True)


def train(strategy):
    """Train with a loss that compares rows; the last batch is uneven."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dropout(0.3, seed=1)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        optimizer, metric = (
            keras.optimizers.Adam(0.1, clipnorm=0.5),
            keras.metrics.Mean(),
        )
        optimizer.build(model.trainable_variables)
    calls = []

    def step(x):
        calls.append(ks.get_replica_context().num_replicas_in_sync)

        def loss_of():
            y = model(x, training=True)
            return ops.mean(ops.square(y - 1)) + ops.max(y) * ops.min(y)

        loss, gradients = ks.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(loss)
        return loss

    batches, losses = [X[:8], X[8:]], []
    if strategy is None:
        losses = [step(ops.convert_to_tensor(batch)) for batch in batches]
    else:
        for batch in strategy.experimental_distribute_dataset(batches):
            losses.append(strategy.run(step, args=(batch,), options=WHOLE))
    numbers = [float(x) for x in (*losses, metric.result())]
    slots = [ops.convert_to_numpy(v) for v in optimizer.variables]
    return [numbers, *model.get_weights(), *slots], calls


def test_whole_function_equals_one_device(replicas, mirrored):
    (one, _), (many, calls) = train(None), train(mirrored(replicas))
    assert largest(one, many) < 2e-5
    assert calls == [1, 1]  # once for each batch, as on one device


def test_synchronized_normalization_of_whole_step(two):
    plain = keras.layers.BatchNormalization()
    with two.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
    for batch in two.experimental_distribute_dataset([X[:8]]):
        step = lambda x: layer(x, training=True)  # noqa: E731
        outputs = two.run(step, args=(batch,), options=WHOLE)
    outputs = ops.convert_to_numpy(two.gather(outputs, axis=0))
    expected = ops.convert_to_numpy(plain(X[:8], training=True))
    assert largest([expected], [outputs]) < 1e-6
    assert largest(plain.get_weights(), layer.get_weights()) < 1e-6


def test_whole_function_is_in_its_strategy(two):
    def where():
        strategies = ks.get_strategy(), ks.get_replica_context().strategy
        return [
            *(x is two and x.num_replicas_in_sync == 1 for x in strategies),
            ks.has_strategy() and not ks.in_cross_replica_context(),
        ]

    assert all(two.run(where, options=WHOLE))
    assert two.num_replicas_in_sync == 2 and not ks.has_strategy()


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="`run` shards otherwise")
def test_shards_are_updated(mirrored):
    sharded = ks.MirroredStrategy(["cpu:0", "cpu:1"], shard="optimizer")
    assert largest(train(None)[0], train(sharded)[0]) < 2e-5


def test_other_arguments_are_unchanged(two):
    arguments = {"args": ("text",), "kwargs": {"b": 3}}
    assert two.run(lambda a, b: (a, b), **arguments, options=WHOLE) == ("text", 3)


def test_other_values_are_refused(two):
    with pytest.raises(ValueError, match="whole='yes'"):
        two.run(lambda: 1, options=ks.RunOptions(whole="yes"))
