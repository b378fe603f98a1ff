"""Names that are older than others: they warn, or say what to use."""

import pickle

import keras
import pytest

import keras_strategy as ks
from keras_strategy.experimental import partitioners as ours


@pytest.fixture
def one():
    return ks.OneDeviceStrategy("cpu:0")


def test_deprecated_strategy_names(two):
    value = ks.PerReplica([keras.ops.ones(()), keras.ops.zeros(())])
    with pytest.warns(DeprecationWarning, match="experimental_local_results"):
        assert [float(x) for x in two.unwrap(value)] == [1.0, 0.0]
    with two.scope():
        v = keras.Variable(1.0)
        with pytest.warns(DeprecationWarning, match="extended.colocate"):
            manager = two.colocate_vars_with(v)
        with manager:
            assert two.extended.variable_created_in_scope(keras.Variable(2.0))
    batches = two.experimental_distribute_dataset([keras.ops.ones((4, 1))])
    with pytest.warns(DeprecationWarning, match="strategy.run"):
        total = two.experimental_run(lambda x: keras.ops.sum(x), iter(batches))
    assert [float(x) for x in two.experimental_local_results(total)] == [2.0, 2.0]


def test_tensorflow_1_names_are_refused(one):
    assert not hasattr(one, "make_dataset_iterator")
    assert not hasattr(type(one), "configure")
    with pytest.raises(AttributeError, match="strategy.experimental_distribute_dat"):
        one.make_dataset_iterator  # noqa: B018
    with pytest.raises(AttributeError, match="nonsense"):
        one.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ks.experimental.nonsense  # noqa: B018


def test_deprecated_option_names():
    with pytest.warns(DeprecationWarning, match="CommunicationImplementation"):
        old = ks.experimental.CollectiveCommunication
    assert old is ks.experimental.CommunicationImplementation
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        hints = ks.experimental.CollectiveHints(bytes_per_pack=3)
    assert hints.bytes_per_pack == 3 and hints.timeout_seconds is None
    assert isinstance(hints, ks.experimental.CommunicationOptions)


def test_deprecated_multi_worker_form():
    with pytest.warns(DeprecationWarning, match="ks|keras_strategy.MultiWorker"):
        strategy = ks.experimental.MultiWorkerMirroredStrategy("ring")
    assert isinstance(strategy, ks.MultiWorkerMirroredStrategy)
    with pytest.warns(DeprecationWarning):
        again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)
    with pytest.raises(ValueError, match="implementation='fast'"), pytest.warns():
        ks.experimental.MultiWorkerMirroredStrategy(communication="fast")


SHAPES = [(10, 3), (7,), (6, 1), (1, 4), (3, 5, 2)]


def variants(module):
    """The partitioners of a module of three classes."""
    yield module.FixedShardsPartitioner(2)
    yield module.FixedShardsPartitioner(20)
    yield module.MinSizePartitioner()
    for size in (1, 4, 17, 1000):
        yield module.MinSizePartitioner(min_shard_bytes=size, max_shards=3)
        yield module.MinSizePartitioner(size, max_shards=100, bytes_per_string=5)
        yield module.MaxSizePartitioner(size)
        yield module.MaxSizePartitioner(size, max_shards=2, bytes_per_string=5)


def test_partitioners_match_native():
    tf = pytest.importorskip("tensorflow")
    theirs = variants(tf.distribute.experimental.partitioners)
    for mine, native in zip(variants(ours), theirs, strict=True):
        for shape in SHAPES:
            for dtype in ("float32", "float16", "int64", "bool", "string"):
                for axis in range(len(shape)):
                    expected = native(tf.TensorShape(shape), tf.as_dtype(dtype), axis)
                    assert mine(shape, dtype, axis) == expected
                    assert mine(tf.TensorShape(shape), tf.as_dtype(dtype), axis)


def test_bad_partitioners_are_refused():
    for make in (
        lambda: ours.MinSizePartitioner(0),
        lambda: ours.MinSizePartitioner(max_shards=0),
        lambda: ours.MaxSizePartitioner(0),
        lambda: ours.MaxSizePartitioner(3, max_shards=0),
        lambda: ours.MaxSizePartitioner(3, bytes_per_string=0),
    ):
        with pytest.raises(ValueError, match="must be positive"):
            make()
    with pytest.raises(ValueError, match="axis=2 for the shape"):
        ours.FixedShardsPartitioner(2)((3, 4), "float32", axis=2)
    with pytest.raises(NotImplementedError):
        ours.Partitioner()((3,), "float32")
