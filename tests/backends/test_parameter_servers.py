"""What only TensorFlow has an engine for: its own there, refused elsewhere."""

import json

import keras
import pytest

import keras_strategy as ks

BACKEND = keras.backend.backend()

# A process of its own, since TensorFlow knows its cluster once and for all.
PROGRAM = """
import json, os, signal

os.environ["GRPC_FAIL_FAST"] = "use_caller"
import keras
import numpy as np
import tensorflow as tf
import keras_strategy as ks
from keras_strategy.launch.ports import free_ports

ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
spec = ks.cluster_resolver.ClusterSpec({"worker": ports[:2], "ps": ports[2:]})
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)  # they wait in it
def forked():
    # A process that becomes worker 1 when it is told to, and ends with this one.
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        os.close(tell)
        if os.read(told, 1):
            server = ks.Server(
                spec.as_dict(), "worker", 1, protocol="grpc", config=config
            )
            os.read(told, 1)
        os._exit(0)
    os.close(told)
    return process, tell

# Before TensorFlow has threads.
(second, start), (third, start_again) = forked(), forked()
os.write(start, b"1")
for job, index in (("worker", 0), ("ps", 0)):
    ks.Server(spec.as_dict(), job, index, protocol="grpc", config=config)
resolver = ks.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
partitioner = ks.experimental.partitioners.FixedShardsPartitioner(2)
strategy = ks.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
coordinator = ks.coordinator.ClusterCoordinator(strategy)
told = {"same": ks.coordinator.ClusterCoordinator(strategy) is coordinator}

with strategy.scope():
    shards = tf.Variable(tf.zeros((10, 4)))
    n = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
told["shards"] = [tuple(v.shape) for v in shards.variables]

@tf.function
def add():
    n.assign_add(1)
    return tf.constant(3)

values = [coordinator.schedule(add) for _ in range(20)]
coordinator.join()
told["done"] = [int(n.numpy()), coordinator.done(), int(values[7].fetch())]
told["fetch"] = [int(x) for x in coordinator.fetch([values[0], 7])]
told["remote"] = isinstance(values[0], ks.coordinator.RemoteValue)

def error_of(fn):
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

told["no function"] = error_of(lambda: coordinator.schedule(3))

@tf.function
def fails():
    return tf.debugging.check_numerics(tf.constant(1.0) / 0.0, "divided")

coordinator.schedule(fails)
told["error"] = error_of(coordinator.join)
told["after it"] = error_of(coordinator.join)

rows = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(100))

@tf.function
def step(iterator):
    return next(iterator)

drawn = [coordinator.schedule(step, args=(iter(rows),)) for _ in range(1)]
coordinator.join()
told["drawn"] = [int(x.fetch()) for x in drawn]

drawn = [coordinator.schedule(add) for _ in range(2000)]
drawn[20].fetch()
os.kill(second, signal.SIGKILL)
os.waitpid(second, 0)
os.write(start_again, b"1")
coordinator.join()
told["killed"] = [sum(int(x.fetch()) for x in drawn), int(n.numpy()) >= 2020]

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((8, 4)), np.ones((8, 3)))).batch(4)
told["fit"] = error_of(lambda: model.fit(data, steps_per_epoch=2, verbose=0))
os.kill(third, signal.SIGKILL)
print(json.dumps(told), flush=True)
os._exit(0)  # the servers have no end
"""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="refused elsewhere")
def test_a_coordinator(program):
    """As tf.distribute's, being that; with a resolver and partitioner of ours."""
    end = program(PROGRAM)
    assert end.exit_status == 0, end.output
    told = json.loads(end.output.splitlines()[-1])
    assert told["same"] and told["remote"]
    assert told["shards"] == [[5, 4], [5, 4]]
    assert told["done"] == [20, True, 3] and told["fetch"] == [3, 7]
    assert told["no function"].startswith("TypeError: ")
    assert told["error"].startswith("InvalidArgumentError") and not told["after it"]
    assert told["drawn"] == [0]
    # What the killed worker had to do was done by others, some of it perhaps twice.
    assert told["killed"] == [3 * 2000, True]
    assert "`fit`, `evaluate` and `predict` of Keras 3 have no loop" in told["fit"]


def test_who_has_no_engine_for_it():
    if BACKEND == "tensorflow":
        import tensorflow as tf

        own = tf.distribute.coordinator.ClusterCoordinator
        assert ks.coordinator.ClusterCoordinator is own
        assert issubclass(
            ks.ParameterServerStrategy, tf.distribute.ParameterServerStrategy
        )
        return
    for make, text in (
        (ks.ParameterServerStrategy, "Use MirroredStrategy or MultiWorker"),
        (ks.experimental.ParameterServerStrategy, "does not equal one device"),
        (ks.coordinator.ClusterCoordinator, "such as Dask or Ray"),
        (ks.experimental.coordinator.PerWorkerValues, "none that take work"),
        (ks.coordinator.experimental_get_current_worker_index, "none that take"),
        (ks.Server, "`keras-strategy run` starts them"),
    ):
        with pytest.raises(ks.errors.UnsupportedBackendError, match=text):
            make(None)
