"""Distributed tf.data datasets: native tf.distribute as the oracle, and tf.function."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Tests of the TensorFlow adapter", allow_module_level=True)

import tensorflow as tf

import keras_strategy as ks
from conformance.compare import largest
from keras_strategy.backends.tensorflow.distributed_dataset import split_by_rows


@pytest.fixture
def native():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


def read(strategy, dataset):
    return [
        [x.numpy().tolist() for x in strategy.experimental_local_results(element)]
        for element in dataset
    ]


def batched(rows, size, **options):
    return tf.data.Dataset.range(rows).batch(size, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: batched(5, 3),
        lambda: batched(3, 1),
        lambda: batched(9, 4, drop_remainder=True),
        lambda: batched(0, 4),
        lambda: batched(9, 4).prefetch(2).map(lambda x: x + 1),
    ],
    ids=["5by3", "3by1", "dropped", "none", "9by4 mapped"],
)
def test_rows_match_native(make, two, native):
    def from_function(context):
        return make()

    for mine, theirs in [
        (
            two.experimental_distribute_dataset(make()),
            native.experimental_distribute_dataset(make()),
        ),
        (
            two.distribute_datasets_from_function(from_function),
            native.distribute_datasets_from_function(from_function),
        ),
    ]:
        rows = read(two, mine)
        assert rows == read(native, theirs)
        specs = theirs.element_spec._value_specs
        if make().cardinality() > 0:
            assert [spec.shape for spec in mine.element_spec.values] == [
                spec.shape for spec in specs
            ]


@pytest.mark.parametrize("buffer", [0, 2])
def test_options_match_native(buffer, two, native):
    def options(module):
        return module.InputOptions(
            experimental_fetch_to_device=False,
            experimental_replication_mode=module.InputReplicationMode.PER_REPLICA,
            experimental_per_replica_buffer_size=buffer,
        )

    def from_function(context):
        start = 100 * context.input_pipeline_id
        return tf.data.Dataset.range(start, start + 3 + context.input_pipeline_id, 1)

    mine = two.distribute_datasets_from_function(
        lambda c: from_function(c).batch(2), options(ks)
    )
    theirs = native.distribute_datasets_from_function(
        lambda c: from_function(c).batch(2), options(tf.distribute)
    )
    assert read(two, mine) == read(native, theirs)


def test_element_types_match_native(two):
    dataset = two.experimental_distribute_dataset(batched(9, 4))
    assert isinstance(dataset, ks.DistributedDataset)
    assert isinstance(dataset, tf.distribute.DistributedDataset)
    iterator = iter(dataset)
    assert isinstance(iterator, ks.DistributedIterator)
    assert isinstance(iterator, tf.distribute.DistributedIterator)
    assert isinstance(next(iterator), ks.PerReplica)
    devices = [x.device[-5:] for x in iterator.get_next().values]
    assert devices == ["CPU:0", "CPU:1"]
    with two.scope():
        optional = iterator.get_next_as_optional()
    assert bool(optional.has_value())
    assert [x.shape[0] for x in optional.get_value().values] == [1, 0]
    assert not bool(iterator.get_next_as_optional().has_value())
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_batches_without_batch_transformation(two):
    def batches():
        yield np.arange(3)
        yield np.arange(2)

    signature = tf.TensorSpec((None,), tf.int64)
    source = tf.data.Dataset.from_generator(batches, output_signature=signature)
    dataset = two.experimental_distribute_dataset(source)
    assert read(two, dataset) == [[[0, 1], [2]], [[0], [1]]]


def test_rows_of_tf_data_service_match_native(two, native):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(address))
    source = tf.data.Dataset.range(7)
    source = source.apply(service.distribute("parallel_epochs", dispatcher.target))
    rows, theirs = (
        read(strategy, strategy.experimental_distribute_dataset(source.batch(4)))
        for strategy in (two, native)
    )
    assert rows == theirs == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    del worker


def test_ragged_and_sparse_batches_are_split(two):
    rows = tf.ragged.constant([[1], [2, 3], []])
    source = tf.data.Dataset.from_tensors((rows, rows.to_sparse()))
    ((ragged, sparse),) = two.experimental_distribute_dataset(source)
    assert [x.to_list() for x in ragged.values] == [[[1], [2, 3]], [[]]]
    dense = [tf.sparse.to_dense(x).numpy().tolist() for x in sparse.values]
    assert dense == [[[1, 0], [2, 3]], [[0, 0]]]


def test_uneven_rows_are_split(two):
    source = tf.data.Dataset.from_tensors((np.ones(4), np.ones(3)))
    with pytest.raises(ValueError, match="same number of rows"):
        two.experimental_distribute_dataset(source)


def test_dropout_of_native_dataset_equals_one_device(two):
    x = np.random.RandomState(0).rand(13, 4).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(6)

    def trained(strategy, data):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    expected = trained(ks.OneDeviceStrategy("cpu:0"), batches)
    with two.scope():
        split = tf.distribute.get_strategy().experimental_distribute_dataset(batches)
    assert largest(expected, trained(two, split)) < 1e-6


class DenseOfSparse(keras.layers.Dense):
    def build(self, shape):
        super().build((None, 4))

    def call(self, inputs):
        if isinstance(inputs, tf.SparseTensor):
            inputs = tf.sparse.to_dense(inputs)
        return super().call(tf.cast(inputs, tf.float32))


def test_step_on_sparse_integers_is_audited(two, caplog):
    x = tf.sparse.from_dense(np.arange(48).reshape(12, 4) % 3)
    batches = tf.data.Dataset.from_tensor_slices((x, np.ones((12, 1), "float32")))

    def loss(y, y_pred):
        return keras.losses.mean_squared_error(y, y_pred)

    with two.scope():
        model = keras.Sequential([DenseOfSparse(1)])
        model.compile("sgd", loss)
    model.fit(batches.batch(5), verbose=0)
    assert not caplog.records


# --- tf.function


@pytest.fixture(params=["two", "one"])
def strategy(request, two):
    return two if request.param == "two" else ks.OneDeviceStrategy("cpu:0")


def test_epoch_in_tf_function_is_not_unrolled(strategy):
    rng = np.random.RandomState(3)
    x, y = rng.randn(42, 4).astype("float32"), rng.randn(42, 1).astype("float32")
    source = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    dataset = strategy.experimental_distribute_dataset(source)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    traces = []

    def step(x, y):
        traces.append(1)

        def loss_of_batch():
            losses = tf.square(y - model(x))[:, 0]
            return ks.compute_average_loss(losses)

        loss, gradients = ks.value_and_grad(loss_of_batch, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def epoch(data):
        total, steps = 0.0, 0
        for x, y in data:
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)))
            steps += 1
        return total, steps

    weights = model.get_weights()
    total, steps = epoch(dataset)
    assert int(steps) == 11
    # Once for each replica, and once more where a loop's shapes are found out.
    assert len(traces) <= 2 * strategy.num_replicas_in_sync
    traced = len(traces)
    epoch(dataset)
    assert len(traces) == traced
    after = model.get_weights()

    model.set_weights(weights)
    again = 0.0
    for _ in range(2):
        for x, y in dataset:
            again += strategy.reduce("SUM", strategy.run(step, args=(x, y)))
    for a, b in zip(after, model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert float(again) > float(total)


def test_loop_in_tf_function_matches_one_devices_random_numbers(two):
    x = np.random.RandomState(3).randn(9, 4).astype("float32")
    source = tf.data.Dataset.from_tensor_slices(x).batch(4)

    def total(strategy):
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)

        @tf.function
        def epoch(data):
            result = tf.zeros(4)
            for x in data:
                rows = strategy.run(lambda x: layer(x, training=True), args=(x,))
                result += strategy.reduce("SUM", rows, axis=0)
            return result

        return epoch(strategy.experimental_distribute_dataset(source)).numpy()

    one = total(ks.OneDeviceStrategy("cpu:0"))
    np.testing.assert_allclose(total(two), one, rtol=1e-6)


def test_tf_function_accepts_datasets_and_iterators(strategy):
    traces = []

    @tf.function
    def total(data):
        traces.append(1)
        result = tf.constant(0, tf.int64)
        for x in data:
            result += strategy.reduce("SUM", x, axis=0)
        return result

    dataset = strategy.experimental_distribute_dataset(batched(9, 4))
    assert [int(total(iter(dataset))) for _ in range(3)] == [36] * 3
    assert len(traces) == 1
    assert [int(total(dataset)) for _ in range(3)] == [36] * 3
    assert len(traces) == 2


def test_get_next_and_optional_in_tf_function(strategy):
    dataset = strategy.experimental_distribute_dataset(batched(9, 4))
    iterator = iter(dataset)

    @tf.function
    def first():
        return strategy.reduce("SUM", iterator.get_next(), axis=0)

    @tf.function
    def then():
        optional = iterator.get_next_as_optional()
        if optional.has_value():
            result = strategy.reduce("SUM", optional.get_value(), axis=0)
        else:
            result = tf.constant(-1, tf.int64)
        return result

    assert [int(first()), *(int(then()) for _ in range(3))] == [6, 22, 8, -1]


def test_element_spec_works_as_input_signature(strategy):
    dataset = strategy.experimental_distribute_dataset(batched(9, 4))
    traces = []

    @tf.function(input_signature=[dataset.element_spec])
    def total(x):
        traces.append(1)
        return strategy.reduce("SUM", strategy.run(lambda x: 2 * x, args=(x,)), axis=0)

    assert [int(total(x)) for x in dataset] == [12, 44, 16]
    assert len(traces) == 1


def test_python_batches_in_tf_function(strategy):
    dataset = strategy.experimental_distribute_dataset([np.ones(4)])
    iterator = iter(dataset)

    @tf.function
    def loop(data):
        for _ in data:
            pass

    for data in (dataset, iterator):
        with pytest.raises(RuntimeError, match="unrolled"):
            loop(data)


@pytest.mark.parametrize("local", [range(4), range(2, 4), range(1, 2), range(1, 3)])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("endless", [True, False])
def test_even_batches_are_split_in_order(fixed, endless, local):
    dataset = tf.data.Dataset.range(16).map(lambda x: {"x": x, "y": (2 * x,)})
    dataset = dataset.batch(8, drop_remainder=fixed)
    dataset = dataset.repeat() if endless else dataset

    parts = split_by_rows(dataset, 4, local)

    length = tf.data.INFINITE_CARDINALITY if endless else 2 * len(local)
    assert int(parts.cardinality()) == length
    assert parts.element_spec["x"].shape.as_list() == [2 if fixed else None]
    begins = [8 * batch + 2 * replica for batch in range(2) for replica in local]
    for begin, part in zip(begins, parts.as_numpy_iterator(), strict=False):
        assert part["x"].tolist() == [begin, begin + 1]
        assert part["y"][0].tolist() == [2 * begin, 2 * begin + 2]
    # Known sizes need no function call for each batch, unless they do not align.
    has_calls = b"FlatMap" in parts._as_serialized_graph().numpy()
    assert has_calls == (not fixed or local == range(1, 3))
