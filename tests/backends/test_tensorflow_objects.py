"""TensorFlow's own objects as arguments; native tf.distribute is the oracle."""

import json

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Tests of the TensorFlow adapter", allow_module_level=True)

import tensorflow as tf

import keras_strategy as ks

CLUSTERS = {
    "spec": tf.train.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]}),
    "gaps": tf.train.ClusterSpec({"worker": {1: "b:2"}}),
}
PARTITIONERS = {
    "FixedShardsPartitioner": (2,),
    "MinSizePartitioner": (8, 3),
    "MaxSizePartitioner": (8, 3),
}
DATASETS = {
    "ragged": lambda: tf.ragged.constant([[1], [2, 3], [4], [5, 6, 7]]),
    "sparse": lambda: tf.sparse.from_dense(np.eye(4)),
    "strings": lambda: ["a", "b", "c", "d"],
    "structure": lambda: {"a": np.arange(4), "b": (np.ones(4),)},
}


def create(api, replicas):
    if replicas == 1:
        return api.OneDeviceStrategy("/cpu:0")
    return api.MirroredStrategy(["/cpu:0", "/cpu:1"], api.ReductionToOneDevice())


def as_plain(strategy, value):
    def convert(tensor):
        if isinstance(tensor, tf.IndexedSlices | tf.SparseTensor):
            return tensor.indices.numpy().tolist(), tensor.values.numpy().tolist()
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.to_list()
        return tensor.numpy().tolist()

    results = strategy.experimental_local_results(value)
    return tf.nest.map_structure(convert, results)


def results_of_values(api, strategy):
    """Yield results of `run`, `reduce` and the extended object for many values."""
    context = api.get_replica_context

    def number():
        return tf.cast(context().replica_id_in_sync_group, "float32") + 1.0

    def rows():
        return tf.IndexedSlices(
            tf.reshape(number(), [1, 1]), tf.constant([1]), tf.constant([3, 1])
        )

    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN)
    pairs = strategy.run(lambda: tf.stack([number(), 2.0]))
    slices = strategy.run(rows)
    destinations = {"variable": variable, "value": pairs, "device": "/cpu:0"}
    options = api.experimental.CommunicationOptions(
        implementation=api.experimental.CommunicationImplementation.RING
    )
    twice = tf.function(lambda x: x * 2.0)
    spec = tf.TensorSpec([], tf.float32)
    for fn in (twice, twice.get_concrete_function(spec)):
        yield as_plain(strategy, strategy.run(fn, (tf.constant(2.0),)))
    xla = api.RunOptions(experimental_xla_options=tf.tpu.XLAOptions())
    yield as_plain(strategy, strategy.run(number, options=xla))
    for name in ("SUM", "MEAN"):
        op = getattr(api.ReduceOp, name)
        for value in (op, name, name.lower(), getattr(tf.distribute.ReduceOp, name)):
            yield strategy.reduce(value, pairs, axis=0).numpy().tolist()
        yield tf.convert_to_tensor(strategy.reduce(op, slices, axis=None)).numpy()
        for fn in (rows, lambda: {"a": [number()], "b": tf.cast(number(), "int64")}):
            found = strategy.run(
                lambda fn=fn, op=op: context().all_reduce(op, fn(), options=options)
            )
            yield as_plain(strategy, found)
        for destination in (
            destinations.values() if strategy.num_replicas_in_sync > 1 else [variable]
        ):
            reduced = strategy.extended.reduce_to(op, pairs, destination, options)
            yield as_plain(strategy, reduced)
        reduced = strategy.extended.batch_reduce_to(
            op, [(pairs, variable), (slices, variable)], options
        )
        yield [as_plain(strategy, value) for value in reduced]
    yield strategy.gather(pairs, axis=0).numpy().tolist()
    gathered = strategy.run(
        lambda: context().all_gather({"a": tf.reshape(number(), [1])}, axis=0)
    )
    yield as_plain(strategy, gathered)
    assigned = strategy.extended.update(
        variable,
        lambda copy, new, factor: copy.assign(new["x"]) * factor,
        args=({"x": tf.constant([3.0, 4.0])},),
        kwargs={"factor": tf.constant(2.0)},
    )
    yield as_plain(strategy, assigned), as_plain(strategy, variable)


def results_of_datasets(api, strategy):
    """Yield what datasets, their iterators and their options give."""
    for create_values in DATASETS.values():
        dataset = tf.data.Dataset.from_tensor_slices(create_values()).batch(4)
        for batch in strategy.experimental_distribute_dataset(dataset):
            yield as_plain(strategy, batch)
            copied = strategy.run(
                lambda x: tf.nest.map_structure(tf.identity, x), (batch,)
            )
            yield as_plain(strategy, copied)
    numbers = tf.data.Dataset.range(6).batch(4)
    options = tf.data.Options()
    options.deterministic = False
    options.threading.private_threadpool_size = 2
    distributed = strategy.experimental_distribute_dataset(
        numbers.with_options(options),
        api.InputOptions(experimental_fetch_to_device=False),
    )

    def add(total, batch):
        return {"total": total["total"] + strategy.reduce("SUM", batch, axis=0)}

    state = {"total": tf.constant(0, tf.int64)}
    yield distributed.reduce(state, add)["total"].numpy()
    iterator = iter(distributed)
    signed = tf.function(input_signature=[iterator.element_spec])(
        lambda batch: strategy.reduce("SUM", batch, axis=0)
    )
    yield signed(next(iterator)).numpy()
    yield bool(iterator.get_next_as_optional().has_value())
    yield bool(iterator.get_next_as_optional().has_value())
    of_context = strategy.distribute_datasets_from_function(
        lambda context: (
            tf.data.Dataset.range(8)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .batch(context.get_per_replica_batch_size(4))
        )
    )
    yield [as_plain(strategy, batch) for batch in of_context]


def results_of_clusters(api, strategy):
    """Yield what resolvers and partitioners give."""
    resolvers = api.cluster_resolver
    config = tf.compat.v1.ConfigProto()
    for cluster in CLUSTERS.values():
        resolver = resolvers.SimpleClusterResolver(
            cluster, task_type="worker", task_id=1, rpc_layer="grpc"
        )
        found = resolver.cluster_spec()
        yield found == cluster, found.as_dict(), resolver.master()
        yield found.as_cluster_def() == cluster.as_cluster_def()
        yield dict(resolver.num_accelerators(config_proto=config))
        chief = resolvers.SimpleClusterResolver(
            tf.train.ClusterSpec({"chief": ["d:1"]})
        )
        yield resolvers.UnionResolver(resolver, chief).cluster_spec().as_dict()
    resolver = resolvers.TFConfigClusterResolver()
    yield resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    for name, arguments in PARTITIONERS.items():
        partition = getattr(api.experimental.partitioners, name)(*arguments)
        for dtype in (tf.float32, tf.string):
            yield list(partition(tf.TensorShape([4, 2]), dtype))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "find", [results_of_values, results_of_datasets, results_of_clusters]
)
def test_results_are_those_of_native(find, replicas, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker"}}
    config["task"]["index"] = 1
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    ours, native = (
        list(find(api, create(api, replicas))) for api in (ks, tf.distribute)
    )
    assert len(ours) == len(native)
    for found, expected in zip(ours, native, strict=True):
        np.testing.assert_equal(found, expected)
