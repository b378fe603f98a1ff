"""Parameter servers: native on TensorFlow, refused elsewhere."""

import json
import pathlib

import keras
import pytest

import keras_strategy as ks

BACKEND = keras.backend.backend()

# A process of its own, since TensorFlow knows its cluster once and for all.
PROGRAM = """
import json, os, signal, sys

sys.path.append(sys.argv[1])
os.environ["GRPC_FAIL_FAST"] = "use_caller"
import keras
import numpy as np
import tensorflow as tf
import keras_strategy as ks
from keras_strategy.commands.local_cluster import free_ports
from tests.backends.coordinator_program import error_of, shared, told

*ports, calls = [f"127.0.0.1:{port}" for port in free_ports(4)]
spec = ks.cluster_resolver.ClusterSpec({"worker": ports[:2], "ps": ports[2:]})
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)  # they wait in it
def forked(serve):
    # A process that serves on request, and ends with this one.
    told, tell = os.pipe()
    process = os.fork()
    if not process:
        os.close(tell)
        if os.read(told, 1):
            server = serve()
            os.read(told, 1)
        os._exit(0)
    os.close(told)
    return process, tell

def as_worker():
    return ks.Server(spec, "worker", 1, protocol="grpc", config=config)

def as_calculator():
    @tf.function(input_signature=[tf.TensorSpec([], "int32")] * 2)
    def add(a, b):
        return tf.add(a, b)

    server = ks.experimental.rpc.Server.create("grpc", calls)
    server.register("add", add)
    server.start()
    os.write(serves, b"1")
    return server

# Before TensorFlow has threads.
calculator, serves = os.pipe()
(second, start), (third, start_again) = forked(as_worker), forked(as_worker)
fourth, start_calculator = forked(as_calculator)
os.write(start, b"1")

def trained(run, call, **options):
    # What comes of two steps, the optimizer's variables last.
    keras.utils.set_random_seed(1)
    table = keras.layers.Embedding(7, 4)
    layers = [table, keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    optimizer = keras.optimizers.AdamW(0.1, global_clipnorm=0.5, **options)
    optimizer.build(model.trainable_variables)

    def update():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.constant([[0, 1, 2], [3, 6, 6]])) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step = tf.function(lambda: run(update))
    call(step), call(step)
    return [*model.variables, *optimizer.variables]

def scheduled(step):
    coordinator.schedule(step)
    coordinator.join()

alone = [v.numpy() for v in trained(lambda fn: fn(), lambda step: step())]
resolver = ks.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
for job, index in (("worker", 0), ("ps", 0)):
    ks.Server(resolver.cluster_spec(), job, index, protocol="grpc", config=config)
partitioner = ks.experimental.partitioners.FixedShardsPartitioner(2)
strategy = ks.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
coordinator = ks.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    shards = tf.Variable(tf.zeros((10, 4)))
    n = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
told["shards"] = [tuple(v.shape) for v in shards.variables]

@tf.function
def add():
    n.assign_add(1)
    return tf.constant(3)

@tf.function
def reduced():
    return strategy.reduce(ks.ReduceOp.SUM, tf.constant(3.0), axis=None)

def fails():
    return tf.debugging.check_numerics(tf.constant(1.0) / 0.0, "divided")

def kill():
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)
    os.write(start_again, b"1")

shared(
    coordinator, tf.function, fails, lambda: tf.data.Dataset.range(100), add, kill, 2000
)
told["reduced"] = float(coordinator.schedule(reduced).fetch())
told["counted"] = int(n.numpy())

with strategy.scope():
    divided = trained(strategy.run, scheduled)
    told["accumulated"] = error_of(
        lambda: trained(strategy.run, scheduled, gradient_accumulation_steps=2)
    )
told["apart"] = max(
    float(np.abs(a - np.array(b)).max()) for a, b in zip(alone, divided, strict=True)
)
told["parts"] = [len(getattr(v.value, "variables", [v])) for v in divided]
checkpoint = tf.train.Checkpoint(v=divided[0])
path = checkpoint.write(sys.argv[2])
divided[0].assign(divided[0] * 0)
checkpoint.read(path)
told["read"] = float(np.abs(np.array(divided[0]) - alone[0]).max())

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((8, 4)), np.ones((8, 3)))).batch(4)
told["fit"] = error_of(lambda: model.fit(data, steps_per_epoch=2, verbose=0))

os.write(start_calculator, b"1")
os.read(calculator, 1)
client = ks.experimental.rpc.Client.create("grpc", calls)
told["called"] = int(client.add_blocking(tf.constant(2), tf.constant(3)))
told["not there"] = bool(client.call("subtract", [tf.constant(2)]).is_ok())
for process in (third, fourth):
    os.kill(process, signal.SIGKILL)
print(json.dumps(told), flush=True)
os._exit(0)  # the servers have no end
"""


ROOT = pathlib.Path(__file__).parents[2]


def check_shared(told, many):
    """Check the results that native's and ours share."""
    assert told["same"] and told["remote"]
    assert told["done"] == [True, 3, 3] and told["fetch"] == [3, 7]
    assert told["no function"].startswith("TypeError: ")
    assert told["index"].startswith("RuntimeError: ")
    assert told["error"] and not told["after it"]
    assert told["next here"].startswith("NotImplementedError: ")
    assert told["drawn"] == 0
    # What the killed worker had to do was done by others, some of it perhaps twice.
    assert told["killed"] == 3 * many


@pytest.mark.skipif(BACKEND != "tensorflow", reason="refused elsewhere")
def test_coordinator_trains_with_parameter_servers(program, tmp_path):
    """As tf.distribute's, being that; with a resolver and partitioner of ours."""
    end = program(PROGRAM, ROOT, tmp_path / "checkpoint")
    assert end.exit_status == 0, end.output
    told = json.loads(end.output.splitlines()[-1])
    check_shared(told, 2000)
    assert told["reduced"] == 3.0  # with this package's enum
    assert told["shards"] == [[5, 4], [5, 4]]
    assert told["error"].startswith("InvalidArgumentError")
    assert told["counted"] >= 2020
    assert "`fit`, `evaluate` and `predict` of Keras 3 have no loop" in told["fit"]
    # Of the model and of the optimizer: its iterations and rate are scalars.
    assert told["parts"] == [2, 2, 2, 1, 1, *[2] * 6]
    assert told["apart"] < 2e-5 and told["read"] < 2e-5
    assert "`gradient_accumulation_steps`" in told["accumulated"]
    assert "use larger batches" in told["accumulated"]
    assert told["called"] == 5 and not told["not there"]


def test_other_backends_refuse_parameter_servers():
    if BACKEND == "tensorflow":
        import tensorflow as tf

        own = tf.distribute.coordinator.ClusterCoordinator
        assert ks.coordinator.ClusterCoordinator is own
        assert issubclass(
            ks.ParameterServerStrategy, tf.distribute.ParameterServerStrategy
        )
        return
    assert not hasattr(ks.experimental.rpc.Client, "create")
    for make, text in (
        (ks.ParameterServerStrategy, "Use MirroredStrategy or MultiWorker"),
        (ks.experimental.ParameterServerStrategy, "results differ from one device"),
        (ks.Server, "`keras-strategy run` starts them"),
        (ks.experimental.rpc.Server, "Use coordinator.ClusterCoordinator"),
    ):
        with pytest.raises(ks.errors.UnsupportedBackendError, match=text):
            make(None)
