"""tf.distribute's tutorial on parameter servers, with a coordinator on every backend.

TensorFlow has the servers, where each function updates the variables itself. Elsewhere
variables stay with the coordinator, and functions return gradients. Functions would do
either at their own times; here one step ends before the next begins, and receives its
batch, so that it is one device's whoever takes it.
"""

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from conformance.ports.port import BACKEND, Outcome, port
from keras_strategy.commands.local_cluster import free_ports

ROWS, BATCH, EPOCHS, STEPS = 37, 8, 2, 5  # the last batch has 5
VOCABULARY = 7


def examples():
    """Return three of seven words, and whether the first word is among them."""
    rng = np.random.default_rng(0)
    words = np.stack([rng.permutation(VOCABULARY)[:3] for _ in range(ROWS)])
    found = (words == 0).any(axis=1, keepdims=True)
    return words.astype("int32"), found.astype("float32")


def made():
    keras.utils.set_random_seed(1)
    l2 = keras.regularizers.L2(1e-4)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(VOCABULARY, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid", kernel_regularizer=l2),
        ]
    )


def with_optimizer():
    model, optimizer = made(), keras.optimizers.RMSprop(0.1)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def batch_bounds():
    """Yield the first row of each batch of all epochs, and the row after its last."""
    for _ in range(EPOCHS):
        for begin in range(0, ROWS, BATCH):
            yield begin, min(begin + BATCH, ROWS)


def loss_of(model, x, y):
    per_example = keras.losses.BinaryCrossentropy(reduction="none")
    loss = ks.compute_average_loss(per_example(y, model(x, training=True)))
    return loss + ks.scale_regularization_loss(model.losses)


def right(model, x, y):
    """Return the number of rows that are predicted correctly."""
    return keras.ops.sum(keras.ops.cast((model(x) > 0.5) == (y > 0.5), "int32"))


def of_worker():
    """State of a worker: its model and its rows."""
    model, rows = made(), examples()
    while True:
        yield model, *rows


def gradients(weights, iterator, begin, end):
    model, x, y = next(iterator)
    model.set_weights(weights)
    part = lambda: loss_of(model, x[begin:end], y[begin:end])  # noqa: E731
    return ks.value_and_grad(part, model.trainable_variables)()


def evaluated(weights, iterator, begin, end):
    model, x, y = next(iterator)
    model.set_weights(weights)
    return right(model, x[begin:end], y[begin:end])


def parts(begin, end, of):
    """Return the rows of each function."""
    bounds = np.linspace(begin, end, of + 1).astype(int).tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def with_dask(workers):
    strategy = ks.OneDeviceStrategy("cpu:0")
    coordinator = ks.coordinator.ClusterCoordinator(strategy, cluster=workers)
    with strategy.scope():
        model, optimizer = with_optimizer()
    iterator = iter(coordinator.create_per_worker_dataset(of_worker))

    def scheduled(fn, begin, end):
        return [
            coordinator.schedule(fn, args=(model.get_weights(), iterator, *part))
            for part in parts(begin, end, workers)
        ]

    logs = []
    for begin, end in batch_bounds():
        values = [value.get() for value in scheduled(gradients, begin, end)]
        shares = [(b - a) / (end - begin) for a, b in parts(begin, end, workers)]
        mean = [
            sum(share * g for share, g in zip(shares, each, strict=True))
            for each in zip(*(found for _, found in values), strict=True)
        ]
        optimizer.apply(mean, model.trainable_variables)
        logs.append(sum(s * loss for s, (loss, _) in zip(shares, values, strict=True)))
    logs.append(sum(coordinator.fetch(scheduled(evaluated, 0, ROWS))) / ROWS)
    return Outcome(of_all(model, optimizer), logs)


def with_servers(workers):
    import tensorflow as tf

    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers + 2)]
    spec = ks.cluster_resolver.ClusterSpec(
        {"worker": addresses[2:], "ps": addresses[:2]}
    )
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=workers + 1)
    for job, tasks in spec.as_dict().items():
        for index in range(len(tasks)):
            ks.Server(spec.as_dict(), job, index, protocol="grpc", config=config)
    resolver = ks.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    partitioner = ks.experimental.partitioners.MinSizePartitioner(64, max_shards=2)
    strategy = ks.ParameterServerStrategy(resolver, partitioner)
    coordinator = ks.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = with_optimizer()
        model.compile("sgd", "mse")
    assert len(model.variables[0].value.variables) == 2  # the shards of the table

    def dataset_fn(context=None):
        return tf.data.Dataset.from_tensor_slices(examples()).batch(ROWS).repeat()

    with pytest.raises(ValueError, match="`fit`, `evaluate` and `predict` of Keras 3"):
        model.fit(dataset_fn(), epochs=1, steps_per_epoch=1, verbose=0)

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    @tf.function
    def step_fn(iterator, begin, end):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x[begin:end], y[begin:end])
            variables = model.trainable_variables
            found = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(found, variables, strict=True))
            return loss

        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def eval_step(iterator, begin, end):
        x, y = next(iterator)
        return strategy.run(right, args=(model, x[begin:end], y[begin:end]))

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))

    def scheduled(fn, begin, end):
        bounds = tf.constant(begin), tf.constant(end)
        return coordinator.schedule(fn, args=(iterator, *bounds))

    logs = []
    for bounds in batch_bounds():
        value = scheduled(step_fn, *bounds)
        coordinator.join()
        logs.append(value.fetch())
    counts = [scheduled(eval_step, *part) for part in parts(0, ROWS, workers)]
    logs.append(sum(coordinator.fetch(counts)) / ROWS)
    return Outcome(of_all(model, optimizer), logs)


def on_one_device():
    model, optimizer = with_optimizer()
    x, y = examples()
    logs = []
    for bounds in batch_bounds():
        part = slice(*bounds)
        loss, found = ks.value_and_grad(
            lambda p=part: loss_of(model, x[p], y[p]), model.trainable_variables
        )()
        optimizer.apply(found, model.trainable_variables)
        logs.append(keras.ops.convert_to_numpy(loss))
    logs.append(keras.ops.convert_to_numpy(right(model, x, y)) / ROWS)
    return Outcome(of_all(model, optimizer), logs)


def of_all(model, optimizer):
    variables = [*model.variables, *optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables]


@port(
    "tensorflow/docs: site/en/tutorials/distribute/parameter_server_training.ipynb",
    needs="distributed",
    coordinator=True,
)
def parameter_server_training(workers):
    if workers is None:
        return on_one_device()
    if BACKEND == "tensorflow":
        return with_servers(workers)
    with pytest.raises(ks.errors.UnsupportedBackendError, match="Only TensorFlow"):
        ks.ParameterServerStrategy(None)
    return with_dask(workers)
