"""How values are combined: tf.distribute's choices, and ways of one's own."""

import logging
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks

BACKEND = keras.backend.backend()
DEVICES = ["cpu:0", "cpu:1"]
CHOICES = [
    ks.ReductionToOneDevice(),
    ks.ReductionToOneDevice("/cpu:1"),
    ks.HierarchicalCopyAllReduce(num_packs=2),
    ks.NcclAllReduce(),
]


class Doubling(ks.CrossDeviceOps):
    """Adds, doubles, and remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        values = per_replica_value.values
        values = [self.broadcast(value, values[0]) for value in values]
        self.asked.append((reduce_op.name, [tuple(v.shape) for v in values]))
        total = 2 * sum(values[1:], values[0])
        if reduce_op is ks.ReduceOp.MEAN:
            total = total / len(values)
        return self.broadcast(total, destinations)


def numbers(structure):
    return keras.tree.map_structure(
        lambda x: ops.convert_to_numpy(x).tolist(), structure
    )


def results(strategy, value):
    return numbers(list(strategy.experimental_local_results(value)))


def per_replica(*values):
    return ks.PerReplica([ops.convert_to_tensor(v) for v in values])


@pytest.fixture
def doubling():
    return ks.MirroredStrategy(DEVICES, Doubling())


def test_gradients_of_different_variables_are_refused(doubling):
    """Gradients of equal shapes could otherwise be added to one another."""
    with doubling.scope():
        variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def step():
        gradients = [None, None]
        replica = ks.get_replica_context().replica_id_in_sync_group
        gradients[int(replica)] = ops.ones(3)
        optimizer.apply(gradients, variables)

    absent = "without gradients of variables"
    with pytest.raises(RuntimeError, match=rf"{absent} \[1\].*{absent} \[0\]"):
        doubling.run(step, options=ks.RunOptions(compile=False))


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_cross_device_ops_choices(choice, caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        if BACKEND == "tensorflow" and isinstance(choice, ks.NcclAllReduce):
            with pytest.raises(ValueError, match="needs GPUs"):
                ks.MirroredStrategy(DEVICES, choice)
            return
        strategy = ks.MirroredStrategy(DEVICES, cross_device_ops=choice)
    if BACKEND == "tensorflow":
        native = strategy.extended.group.native.extended._cross_device_ops
        assert type(native).__name__ == type(choice).__name__
    else:
        assert f"{choice!r} has no effect on {BACKEND}" in caplog.text
    total = strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert results(strategy, total) == [4.0, 4.0]
    again = pickle.loads(pickle.dumps(strategy))
    assert repr(again._cross_device_ops) == repr(choice)


def test_one_device_skips_reduction(caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        ks.MirroredStrategy(["cpu:0"], Doubling())
    assert "no effect on one device" in caplog.text


def test_bad_choices_are_refused():
    class Own(ks.CrossDeviceOps):
        pass

    for choice in (3, ks.CrossDeviceOps(), Own(), ks.NcclAllReduce):
        with pytest.raises(TypeError, match="`cross_device_ops` must be"):
            ks.MirroredStrategy(DEVICES, choice)

    class Gathering(ks.ReductionToOneDevice):
        def _gather_implementation(self, *args):
            raise AssertionError("not called")

    with pytest.raises(TypeError, match="`_gather_implementation` of Gathering"):
        ks.MirroredStrategy(DEVICES, Gathering())
    with pytest.raises(ValueError, match="num_packs=-1"):
        ks.NcclAllReduce(num_packs=-1)
    with pytest.raises(TypeError, match="num_packs=1.5"):
        ks.HierarchicalCopyAllReduce(1.5)
    with pytest.raises(ValueError, match="kind and index"):
        ks.ReductionToOneDevice("?")
    with pytest.raises(TypeError, match="accumulation_fn=3"):
        ks.ReductionToOneDevice(accumulation_fn=3)


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_standalone_reduce(choice, two):
    """As tf.distribute's do, of the same values."""
    value = per_replica([1.0, 2.0], [3.0, 5.0])
    total = choice.reduce("sum", value, destinations=value)
    assert isinstance(total, ks.Mirrored)
    assert numbers(list(total.values)) == [[4.0, 7.0]] * 2
    mean = choice.reduce(ks.ReduceOp.MEAN, value, "cpu:1")
    assert numbers(mean) == [2.0, 3.5]
    with two.scope():
        variable = keras.Variable([0.0, 0.0])
        pairs = [(value, variable), (value, "cpu:0")]
        first, second = choice.batch_reduce("MEAN", pairs)
        copies = choice.broadcast(ops.ones(()), variable)
    assert numbers(list(first.values)) == [[2.0, 3.5]] * 2
    assert numbers(second) == [2.0, 3.5]
    assert numbers(list(copies.values)) == [1.0, 1.0]
    if BACKEND == "tensorflow" and not isinstance(choice, ks.NcclAllReduce):
        import tensorflow as tf

        native = getattr(tf.distribute, type(choice).__name__)()
        mean = tf.distribute.ReduceOp.MEAN
        theirs = native.reduce(mean, tf.constant([2.0, 3.5]), "cpu:0")
        assert numbers(theirs) == numbers(second)


def test_bad_arguments_are_refused():
    choice, value = ks.ReductionToOneDevice(), per_replica([1.0], [2.0])
    with pytest.raises(ValueError, match="max"):
        choice.reduce("max", value, value)
    with pytest.raises(TypeError, match="destinations=3"):
        choice.reduce("sum", value, 3)
    with pytest.raises(ValueError, match="must be pairs"):
        choice.batch_reduce("sum", [value])
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        ks.CrossDeviceOps().reduce("sum", value, value)


def test_custom_reduction_of_values(doubling):
    value = per_replica([1.0, 2.0], [3.0, 5.0])
    assert numbers(doubling.reduce("SUM", value, axis=None)) == [8.0, 14.0]
    assert numbers(doubling.reduce("MEAN", value, axis=None)) == [4.0, 7.0]
    assert numbers(doubling.reduce("SUM", value, axis=0)) == 22.0
    uneven = per_replica([1.0, 2.0, 3.0], [6.0])
    assert numbers(doubling.reduce("MEAN", uneven, axis=0)) == 6.0
    with doubling.scope():
        variable = keras.Variable([0.0, 0.0])
    # To gather is the engine's: nothing is added.
    assert numbers(doubling.gather(uneven, axis=0)) == [1.0, 2.0, 3.0, 6.0]
    extended = doubling.extended
    total = extended.reduce_to("sum", value, destinations=variable)
    assert results(doubling, total) == [[8.0, 14.0]] * 2
    pairs = [(value, variable), (value, "cpu:1")]
    mirrored, single = extended.batch_reduce_to("mean", pairs)
    assert results(doubling, mirrored) == [[4.0, 7.0]] * 2
    assert numbers(single) == [4.0, 7.0]


@pytest.mark.parametrize("compile", [None, False])
def test_custom_reduction_in_all_reduce(doubling, compile):
    """In `run`, compiled or not; its gradient is that of a sum."""
    with doubling.scope():
        w = keras.Variable(3.0)

    def step(x):
        replica = ks.get_replica_context()
        loss = ks.value_and_grad(lambda: replica.all_reduce("sum", w * x), [w])
        count = replica.all_reduce("sum", True)
        return *loss(), replica.all_reduce("MEAN", x), count

    value, (gradient,), mean, count = doubling.run(
        step, (per_replica(1.0, 2.0),), options=ks.RunOptions(compile=compile)
    )
    assert results(doubling, value) == [18.0, 18.0]
    assert results(doubling, mean) == [3.0, 3.0]
    assert results(doubling, gradient) == [2.0, 4.0]  # the loss of both replicas
    assert results(doubling, count) == [4, 4]


def test_custom_reduction_in_merge_call(doubling):
    def step(x):
        def merge(strategy, x):
            return strategy.reduce("sum", x), strategy.extended.reduce_to("sum", x, x)

        return ks.get_replica_context().merge_call(merge, (x,))

    both = doubling.run(step, (per_replica(1.0, 2.0),))
    assert [results(doubling, x) for x in both] == [[6.0, 6.0]] * 2


X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model_of(strategy, rate):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
        model.set_weights([np.ones((3, 1)), np.zeros(1)])
    return model


def loop(strategy, model):
    def step(x, y):
        def loss():
            return ks.compute_average_loss(ops.mean((model(x) - y) ** 2, axis=-1))

        _, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)

    batches = [(X[i : i + 4], Y[i : i + 4] + 1) for i in range(0, 10, 4)]
    for x, y in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, (x, y))


@pytest.mark.full(keep_on="tensorflow")
def test_custom_reduction_of_gradients(doubling, two):
    """Twice the gradients are twice the rate; the batches end with 1 + 1 rows."""
    expected = model_of(two, 0.2)
    loop(two, expected)
    found = model_of(doubling, 0.1)
    loop(doubling, found)
    for theirs, ours in zip(expected.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert ("SUM", [(3, 1), (3, 1)]) in doubling._cross_device_ops.asked


def test_custom_reduction_in_fit(doubling, two):
    """The metrics are of all rows, once."""
    found = model_of(doubling, 0.1)
    if BACKEND == "jax":
        with pytest.raises(RuntimeError, match="one program over all devices"):
            found.fit(X, Y + 1, batch_size=4, verbose=0)
        with pytest.raises(RuntimeError, match="`train_on_batch` on JAX"):
            found.train_on_batch(X[:4], Y[:4])
        assert found.evaluate(X, Y, verbose=0)[0] < 1e-6
        return
    expected = model_of(two, 0.2)
    logs = [
        model.fit(X[:9], Y[:9] + 1, batch_size=4, shuffle=False, verbose=0).history
        for model in (expected, found)
    ]
    for theirs, ours in zip(expected.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for key, value in logs[0].items():
        np.testing.assert_allclose(logs[1][key], value, atol=1e-6)


def test_accumulation_function_is_used(two):
    calls = []

    def add(tensors):
        calls.append(len(tensors))
        return sum(tensors[1:], tensors[0])

    choice = ks.ReductionToOneDevice(accumulation_fn=add)
    strategy = ks.MirroredStrategy(DEVICES, choice)
    total = strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert results(strategy, total) == [4.0, 4.0] and calls == [2]


def test_bad_results_of_subclass_are_refused():
    class Python(Doubling):
        def reduce_implementation(self, reduce_op, per_replica_value, *args):
            return 3.0

    class Longer(Doubling):
        def reduce_implementation(self, reduce_op, value, destinations, options):
            return self.broadcast(ops.ones((7,)), destinations)

    for own, error, text in (
        (Python(), TypeError, "must return tensors"),
        (Longer(), ValueError, "of the shapes"),
    ):
        strategy = ks.MirroredStrategy(DEVICES, own)
        with pytest.raises(error, match=text):
            strategy.reduce("sum", per_replica([1.0], [2.0]))
