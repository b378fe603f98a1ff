"""Distributed datasets: sources, splitting, and what is refused.

The counts of rows are those of native tf.distribute, which were recorded with
TensorFlow 2.21 on two logical CPUs; tests/backends/test_tensorflow_datasets.py asks it
again.
"""

import keras
import numpy as np
import pytest

import keras_strategy as ks

BATCHES = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 9)]
SPLIT = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]


def components(strategy, value):
    local = strategy.experimental_local_results(value)
    return [keras.ops.convert_to_numpy(x).tolist() for x in local]


def read(strategy, dataset):
    return [components(strategy, element) for element in dataset]


# --- splitting


@pytest.mark.parametrize(
    ("sizes", "replicas", "expected"),
    [
        ([4, 4, 2], 2, [[2, 2], [2, 2], [1, 1]]),
        ([4, 4, 1], 2, [[2, 2], [2, 2], [1, 0]]),
        ([3, 2], 2, [[2, 1], [1, 1]]),
        ([1, 1], 2, [[1, 0], [1, 0]]),
        ([8, 5], 3, [[3, 3, 2], [2, 2, 1]]),
        ([8, 5, 1], 4, [[2, 2, 2, 2], [2, 2, 1, 0], [1, 0, 0, 0]]),
    ],
)
def test_batch_is_split_over_replicas(sizes, replicas, expected, mirrored):
    strategy = mirrored(replicas)
    batches = [np.ones((size, 3), "float32") for size in sizes]
    dataset = strategy.experimental_distribute_dataset(batches)
    shapes = [[x.shape for x in element.values] for element in dataset]
    assert shapes == [[(rows, 3) for rows in step] for step in expected]


def test_row_order_and_second_epoch(two):
    dataset = two.experimental_distribute_dataset(BATCHES)
    assert isinstance(dataset, ks.DistributedDataset)
    assert read(two, dataset) == SPLIT
    assert read(two, dataset) == SPLIT


def test_nested_structures_are_split(two):
    batch = {"a": (np.arange(3), np.ones((3, 2), "float32")), "b": None, "c": [BATCHES]}
    batch["c"] = [np.arange(3) * 2]
    (element,) = two.experimental_distribute_dataset([batch])
    assert element["b"] is None
    assert isinstance(element["a"][0], ks.PerReplica)
    assert components(two, element["a"][0]) == [[0, 1], [2]]
    assert components(two, element["a"][1]) == [[[1.0, 1.0]] * 2, [[1.0, 1.0]]]
    assert components(two, element["c"][0]) == [[0, 2], [4]]


def test_components_are_on_replica_devices(mirrored):
    strategy = mirrored(3)
    (x,) = strategy.experimental_distribute_dataset([np.ones((6, 2), "float32")])
    assert all(keras.ops.is_tensor(part) for part in x.values)
    with strategy.scope():
        variable = keras.Variable(1.0)
    others = strategy.experimental_local_results(variable)
    for part, other in zip(x.values, others, strict=True):
        assert part.device == other.device
        assert keras.backend.standardize_dtype(part.dtype) == "float32"


def test_one_replica_gets_plain_batches():
    for strategy in (ks.OneDeviceStrategy("cpu:0"), ks.get_strategy()):
        elements = list(strategy.experimental_distribute_dataset(BATCHES))
        assert all(keras.ops.is_tensor(element) for element in elements)
        values = [keras.ops.convert_to_numpy(x).tolist() for x in elements]
        assert values == [batch.tolist() for batch in BATCHES]


def test_reused_buffer_is_copied(two):
    def batches():
        buffer = np.zeros((4, 64), "float32")
        for step in range(3):
            buffer[:] = step
            yield buffer

    for strategy in (two, ks.OneDeviceStrategy("cpu:0")):
        elements = list(strategy.experimental_distribute_dataset(batches()))
        firsts = [strategy.experimental_local_results(x)[0] for x in elements]
        assert [float(x[0][0]) for x in firsts] == [0.0, 1.0, 2.0]


# --- datasets from a function


@pytest.mark.parametrize(
    ("sizes", "replicas", "expected"),
    [
        ([2, 2, 2], 2, [[2, 2], [2, 0]]),
        ([2, 2, 2, 1], 2, [[2, 2], [2, 1]]),
        ([3, 1], 2, [[3, 1]]),
        ([2, 2], 3, [[2, 2, 0]]),
        ([], 2, []),
    ],
)
def test_per_replica_batches_take_turns(sizes, replicas, expected, mirrored):
    strategy = mirrored(replicas)
    asked = []

    def dataset_fn(context):
        asked.append(context)
        return [np.ones((size, 3), "float32") for size in sizes]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    shapes = [[x.shape for x in element.values] for element in dataset]
    assert shapes == [[(rows, 3) for rows in step] for step in expected]
    (context,) = asked
    fields = context.num_input_pipelines, context.input_pipeline_id
    assert fields == (1, 0)
    assert context.num_replicas_in_sync == replicas
    assert context.get_per_replica_batch_size(2 * replicas) == 2


def test_deprecated_name_with_one_replica(two):
    dataset = two.experimental_distribute_datasets_from_function(lambda _: BATCHES)
    assert read(two, dataset) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]]
    one = ks.OneDeviceStrategy("cpu:0")
    dataset = one.distribute_datasets_from_function(lambda _: BATCHES)
    values = [keras.ops.convert_to_numpy(x).tolist() for x in dataset]
    assert values == [batch.tolist() for batch in BATCHES]


def test_one_dataset_per_replica(two):
    options = ks.InputOptions(
        experimental_replication_mode=ks.InputReplicationMode.PER_REPLICA
    )

    def dataset_fn(context):
        assert context.num_input_pipelines == 2
        return [np.full(2, context.input_pipeline_id)] * (2 + context.input_pipeline_id)

    dataset = two.distribute_datasets_from_function(dataset_fn, options)
    assert read(two, dataset) == [[[0, 0], [1, 1]]] * 2 + [[[], [1, 1]]]


def test_unbatched_elements_go_to_replicas(two):
    dataset = two.distribute_datasets_from_function(lambda _: [1.0, 2.0, 3.0, 4.0, 5.0])
    assert read(two, dataset) == [[1.0, 2.0], [3.0, 4.0]]


# --- what a dataset can be


class Sequence(keras.utils.PyDataset):
    """Finite, and notes its epochs."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[index]

    def on_epoch_begin(self):
        self.epochs.append("begin")

    def on_epoch_end(self):
        self.epochs.append("end")


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.full(2, index)


def test_py_dataset(two):
    source = Sequence()
    dataset = two.experimental_distribute_dataset(source)
    assert read(two, dataset) == read(two, dataset) == SPLIT
    assert source.epochs == ["begin", "end"] * 2


def test_endless_py_dataset(two):
    iterator = iter(two.experimental_distribute_dataset(Endless()))
    assert [components(two, next(iterator)) for _ in range(3)] == [
        [[i], [i]] for i in range(3)
    ]


def test_torch_data_loader(two):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(9), torch.ones((9, 2)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    dataset = two.experimental_distribute_dataset(loader)
    for _ in range(2):
        elements = list(dataset)
        assert [components(two, x) for x, _ in elements] == SPLIT
        shapes = [[tuple(part.shape) for part in y.values] for _, y in elements]
        assert shapes == [[(2, 2), (2, 2)], [(2, 2), (2, 2)], [(1, 2), (0, 2)]]


def test_iterable_torch_data_loader(two):
    torch = pytest.importorskip("torch")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(9))

    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4)
    assert read(two, two.experimental_distribute_dataset(loader)) == SPLIT


@pytest.fixture
def tf():
    """TensorFlow beside the backend in use, as a process may have it."""
    return pytest.importorskip("tensorflow")


def test_tf_data(tf, two):
    numbers = tf.data.Dataset.range(9).batch(4)
    dataset = two.experimental_distribute_dataset(numbers)
    assert read(two, dataset) == read(two, dataset) == SPLIT
    dataset = two.distribute_datasets_from_function(lambda _: numbers)
    assert read(two, dataset) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]]


def test_tf_data_of_fixed_shapes(tf, two):
    """A round that is not full is dropped then, as in tf.distribute."""
    numbers = tf.data.Dataset.range(7).batch(2, drop_remainder=True)
    dataset = two.distribute_datasets_from_function(lambda _: numbers)
    assert read(two, dataset) == [[[0, 1], [2, 3]]]
    numbers = tf.data.Dataset.range(7).batch(3, drop_remainder=True)
    dataset = two.experimental_distribute_dataset(numbers)
    assert read(two, dataset) == [[[0, 1], [2]], [[3, 4], [5]]]


def test_tf_data_structures(tf, two):
    data = {"x": np.arange(6), "y": (np.ones((6, 2), "float32"),)}
    batches = tf.data.Dataset.from_tensor_slices(data).batch(4)
    first, second = two.experimental_distribute_dataset(batches)
    assert components(two, first["x"]) == [[0, 1], [2, 3]]
    assert components(two, second["x"]) == [[4], [5]]
    assert components(two, second["y"][0]) == [[[1.0, 1.0]]] * 2


def test_endless_tf_data(tf, two):
    numbers = tf.data.Dataset.range(4).batch(4).repeat()
    iterator = iter(two.experimental_distribute_dataset(numbers))
    for _ in range(3):
        assert components(two, next(iterator)) == [[0, 1], [2, 3]]


def test_generator_is_read_once(two):
    dataset = two.experimental_distribute_dataset(batch for batch in BATCHES)
    first = next(iter(dataset))
    assert components(two, first) == SPLIT[0]
    assert read(two, dataset) == SPLIT[1:]
    with pytest.raises(RuntimeError, match="have been read"):
        iter(dataset)


def test_backend_tensors_are_split(two):
    batches = [keras.ops.convert_to_tensor(batch) for batch in BATCHES]
    assert read(two, two.experimental_distribute_dataset(batches)) == SPLIT


# --- iterators


def test_iterator(two):
    iterator = iter(two.experimental_distribute_dataset(BATCHES))
    assert isinstance(iterator, ks.DistributedIterator)
    assert iter(iterator) is iterator
    assert components(two, iterator.get_next()) == SPLIT[0]
    optional = iterator.get_next_as_optional()
    assert optional.has_value() and components(two, optional.get_value()) == SPLIT[1]
    next(iterator)
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(ValueError, match="has_value"):
        optional.get_value()
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_element_spec(two):
    def batches():
        yield np.ones((4, 3), "float32"), np.arange(4, dtype="int32"), None

    dataset = two.experimental_distribute_dataset(batches())
    for spec in (dataset.element_spec, iter(dataset).element_spec):
        x, y, nothing = spec
        assert nothing is None
        assert [(c.shape, c.dtype) for c in x.values] == [((None, 3), "float32")] * 2
        assert [(c.shape, c.dtype) for c in y.values] == [((None,), "int32")] * 2
    one = ks.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(BATCHES)
    assert one.element_spec.shape == (None,)


def test_element_spec_consumes_nothing(two):
    dataset = two.experimental_distribute_dataset(batch for batch in BATCHES)
    assert dataset.element_spec.values[0].shape == (None,)
    iterator = iter(dataset)
    assert iterator.element_spec.values[0].shape == (None,)
    assert read(two, iterator) == SPLIT
    with pytest.raises(ValueError, match="has no element"):
        _ = two.experimental_distribute_dataset([]).element_spec


def test_reduce(two):
    def add(state, element):
        return state + int(two.reduce("SUM", element, axis=0))

    assert two.experimental_distribute_dataset(BATCHES).reduce(0, add) == 36


# --- InputContext and InputOptions


def test_input_context():
    context = ks.InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(8) == 2
    assert "input_pipeline_id=1" in repr(context)
    with pytest.raises(ValueError, match="global_batch_size=6"):
        context.get_per_replica_batch_size(6)
    assert ks.InputContext().get_per_replica_batch_size(6) == 6


def test_input_options():
    mode = ks.InputReplicationMode.PER_WORKER
    policy = ks.experimental.AutoShardPolicy
    assert tuple(ks.InputOptions()) == (True, mode, False, 1, policy.AUTO, False)
    assert ks.InputOptions(auto_shard_policy="off").auto_shard_policy is policy.OFF
    with pytest.raises(ValueError, match="`auto_shard_policy` must be .*'FILES'"):
        ks.InputOptions(auto_shard_policy="FILES")
    assert ks.InputOptions(False)._replace(experimental_fetch_to_device=True)
    with pytest.raises(ValueError, match="experimental_replication_mode='PER'"):
        ks.InputOptions(experimental_replication_mode="PER")
    with pytest.raises(ValueError, match="PER_REPLICA"):
        ks.InputOptions(experimental_place_dataset_on_device=True)


def test_prefetch_options(two):
    options = ks.InputOptions(experimental_per_replica_buffer_size=2)
    dataset = two.experimental_distribute_dataset(BATCHES, options)
    assert read(two, dataset) == SPLIT


# --- bad input


@pytest.mark.parametrize(
    "dataset",
    [3, None, np.ones(4), "name", (np.ones(4), np.ones(4)), {"x": np.ones(4)}],
    ids=["number", "None", "array", "string", "tuple", "dict"],
)
def test_other_objects_are_refused(dataset, two):
    with pytest.raises(TypeError, match="`dataset` must be a dataset of batches"):
        two.experimental_distribute_dataset(dataset)
    with pytest.raises(
        TypeError, match="The return value of `dataset_fn` must be a dataset"
    ):
        two.distribute_datasets_from_function(lambda _: dataset)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((np.ones((4, 2)), np.ones(3)), ValueError, r"\(4, 2\), \(3,\)"),
        (3.0, ValueError, r"shapes \[\(\)\].*batch\("),
        ((np.ones(2), np.float32(3)), ValueError, r"\(2,\), \(\)"),
        ([1, 2, 3], ValueError, r"\[\(\), \(\), \(\)\]"),
        (object(), TypeError, "holds <object object"),
        (np.array([object()]), TypeError, "dtype object"),
    ],
    ids=["rows", "scalar", "one scalar", "list", "object", "objects"],
)
def test_bad_elements_are_refused(batch, error, message, two):
    for strategy in (two, ks.OneDeviceStrategy("cpu:0")):
        dataset = strategy.experimental_distribute_dataset([batch])
        with pytest.raises(error, match=message):
            list(dataset)


def test_unbatched_tf_data_is_refused(tf, two):
    with pytest.raises(ValueError, match=r"\.batch\(global_batch_size\)"):
        list(two.experimental_distribute_dataset(tf.data.Dataset.range(4)))


def test_differing_structures_are_refused(two):
    dataset = two.distribute_datasets_from_function(lambda _: [np.ones(2), (1, 2)])
    with pytest.raises(ValueError, match="elements of one structure"):
        list(dataset)


def test_bad_arguments_are_refused(two):
    with pytest.raises(TypeError, match="must be a `keras_strategy.InputOptions`"):
        two.experimental_distribute_dataset(BATCHES, options={"buffer": 1})
    with pytest.raises(TypeError, match="must be a `keras_strategy.InputOptions`"):
        two.distribute_datasets_from_function(lambda _: BATCHES, options=3)
    with pytest.raises(TypeError, match="`dataset_fn` must be a function"):
        two.distribute_datasets_from_function(BATCHES)
    per_replica = ks.InputOptions(
        experimental_replication_mode=ks.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        two.experimental_distribute_dataset(BATCHES, per_replica)
    dataset = two.experimental_distribute_dataset(BATCHES)
    with pytest.raises(ValueError, match="distributed already"):
        two.experimental_distribute_dataset(dataset)
    with pytest.raises(ValueError, match="distributed already"):
        two.distribute_datasets_from_function(lambda _: dataset)


def test_distributing_inside_replica_is_refused(two):
    dataset = two.experimental_distribute_dataset(BATCHES)
    iterator = iter(dataset)
    calls = [
        lambda: two.experimental_distribute_dataset(BATCHES),
        lambda: two.distribute_datasets_from_function(lambda _: BATCHES),
        lambda: iter(dataset),
        lambda: next(iterator),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="inside one"):
            two.run(call)


def test_iterating_under_another_strategy(mirrored):
    first, second = mirrored(2), mirrored(3)
    dataset = first.experimental_distribute_dataset(BATCHES)
    iterator = iter(dataset)
    with second.scope():
        with pytest.raises(RuntimeError, match="Mixing different strategies"):
            iter(dataset)
        with pytest.raises(RuntimeError, match="Mixing different strategies"):
            next(iterator)
    with first.scope():
        assert components(first, next(iterator)) == SPLIT[0]
