"""Functions that a worker process imports and calls, shared by several tests.

Each returns NumPy arrays and numbers alone. Where `alone` is true it does the same on
one device, in this process: what the workers must equal.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.sockets import listening_addresses

# What makes the strategy that workers train under.
make_strategy: Callable[..., ks.Strategy] = ks.MultiWorkerMirroredStrategy


def in_charge(alone: bool, **kwargs: Any) -> Any:
    """The strategy to make a model in, and the scope."""
    if alone:
        return None, contextlib.nullcontext()
    # Alone, it is the chief's seeds that count.
    strategy = make_strategy(**kwargs)
    rank = strategy.extended.local_replicas.start
    keras.utils.set_random_seed(17 + rank)
    return strategy, strategy.scope()


def in_turns(calls: dict[str, tuple[Callable, dict]]) -> dict[str, Any]:
    """Return the results of functions that are called one after the other.

    Args:
        calls: By the name of the result: a function, and its arguments.
    """
    return {name: fn(**arguments) for name, (fn, arguments) in calls.items()}


def digits(rows: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 6 numbers, and the class of each among 3."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 3))).argmax(axis=1).astype("int32")


def classifier(optimizer: Any = None, noise: bool = False) -> keras.Model:
    """A model with slots and metrics; with `noise` it draws random numbers."""
    middle = [keras.layers.Dropout(0.3, seed=5)] if noise else []
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            *middle,
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        optimizer or keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def weights(model: keras.Model) -> list[np.ndarray]:
    """The values of a model's and its optimizer's variables."""
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def fit_arrays(alone: bool = False, rows: int = 29, batch_size: int = 8) -> dict:
    """Trains, evaluates and predicts; 29 rows by 8 end with a batch of 5."""
    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    with scope:
        model = classifier(noise=True)
    x, y = digits(rows)
    sample_weight = np.linspace(0.5, 2.0, rows).astype("float32")
    seen: list[dict] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    history = model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        epochs=3,
        validation_data=digits(7, seed=4),
        verbose=0,
        callbacks=[watch],
    )
    return {
        "weights": weights(model),
        "history": history.history,
        "logs": seen,
        "evaluated": model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True),
        "predicted": model.predict(x, batch_size=batch_size, verbose=0),
        "on_batch": model.train_on_batch(x[:5], y[:5], return_dict=True),
    }


def batch_statistics(alone: bool = False) -> list[np.ndarray]:
    """Normalizes by the global batch; of the last one a worker has no rows."""
    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, _ = digits(9)
    model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0)
    return weights(model)


class Clips(keras.optimizers.Adam):
    """Changes the gradients of all rows before it applies them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Clips them."""
        clipped = [keras.ops.clip(gradient, -0.05, 0.05) for gradient in grads]
        super().apply(clipped, trainable_variables)


def users_functions(alone: bool = False) -> list[np.ndarray]:
    """Train with custom functions that gather the rows of all replicas."""

    def scaled(x):
        context: Any = ks.get_replica_context()
        return x / keras.ops.max(keras.ops.abs(context.all_gather(x, axis=0)))

    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, scaled, activity_regularizer=keras.ops.mean),
                keras.layers.Dense(3),
            ]
        )
        model.compile(Clips(0.01), "mse")
    x, _ = digits(9)
    model.fit(x, x[:, :3], batch_size=4, epochs=2, verbose=0)
    return weights(model)


def collectives() -> dict:
    """Return the results of collectives of replicas on different workers."""
    strategy = ks.MultiWorkerMirroredStrategy()
    n = strategy.num_replicas_in_sync
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")
        first = keras.Variable(
            keras.random.normal((2,), seed=None), aggregation="only_first_replica"
        )

    def step(i):
        context = ks.get_replica_context()
        total.assign_add(i + 1.0)
        row = keras.ops.reshape(i, (1,))
        return {
            "id": context.replica_id_in_sync_group + 0 * i,
            "sum": context.all_reduce("sum", i),
            "mean": context.all_reduce("mean", i),
            "gathered": context.all_gather(row, axis=0),
            "row": row,
        }

    out = strategy.run(step, args=(ids,))

    def local(value):
        return [
            keras.ops.convert_to_numpy(part)
            for part in strategy.experimental_local_results(value)
        ]

    return {
        "replicas": n,
        "local": {key: local(value) for key, value in out.items()},
        "sum": float(strategy.reduce("sum", out["row"], axis=0)),
        "mean": float(strategy.reduce("mean", out["row"], axis=0)),
        "elementwise": keras.ops.convert_to_numpy(
            strategy.reduce("sum", out["row"], axis=None)
        ),
        "gathered": keras.ops.convert_to_numpy(strategy.gather(out["row"], axis=0)),
        "total": float(total),
        "first": keras.ops.convert_to_numpy(first),
        "listens at": listening_addresses(),
    }


def custom_loop(alone: bool = False, rate: float = 0.0) -> list[np.ndarray]:
    """Run a custom loop over a distributed dataset with a last batch of 5 rows."""
    keras.utils.set_random_seed(17)
    strategy, _ = in_charge(alone)
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dropout(rate, seed=3),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    x, y = digits(29)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 29, 8)]

    def step(x, y):
        def loss_fn(x, y):
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return ks.compute_average_loss(losses)

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)(x, y)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = []
    for x, y in strategy.experimental_distribute_dataset(batches):
        loss = strategy.run(step, args=(x, y))
        losses.append(float(strategy.reduce("sum", loss)))
    values = [keras.ops.convert_to_numpy(v) for v in model.variables]
    return [np.array(losses), *values]


def epochs_of_different_length() -> dict:
    """Generators of which the last worker's gives one batch less."""
    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.stop == strategy.num_replicas_in_sync
    with strategy.scope():
        model = classifier()

    def batches():
        for _ in range(3 - last):
            yield digits(8)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches(), verbose=0)
    return {
        "weights": weights(model),
        "steps": int(model.optimizer.iterations),
        "warned": [str(w.message) for w in caught if "has ended" in str(w.message)],
    }


def different_batches() -> str:
    """Batches of different numbers of rows on the workers."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    with strategy.scope():
        model = classifier()
    try:
        model.fit((digits(8 + rank) for _ in range(1)), verbose=0)
    except ValueError as error:
        said = str(error)
    else:
        return "no error"
    # Nothing is left waiting.
    model.fit((digits(8) for _ in range(1)), verbose=0)
    return said


def sources_that_fail() -> list[str]:
    """Worker 1 cannot read its third batch, in fit and in a loop of its own."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    with strategy.scope():
        model = classifier()
    # Keras reads two batches before an epoch begins, and one to build a model.
    model.fit(*digits(8), verbose=0)

    def batches():
        yield digits(8)
        yield digits(8)
        if rank == 1:
            raise OSError("the disk is gone")
        yield digits(8)

    dataset = strategy.distribute_datasets_from_function(lambda context: batches())
    said = []
    for read in (lambda: model.fit(batches(), verbose=0), lambda: list(dataset)):
        try:
            read()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    # Nothing is left waiting.
    model.fit(*digits(8), verbose=0)
    return said


def datasets_of_their_own() -> dict:
    """Each worker reads batches of its own; the last one has one batch less."""
    strategy = ks.MultiWorkerMirroredStrategy()
    contexts = []

    def dataset_fn(context):
        contexts.append([context.num_input_pipelines, context.input_pipeline_id])
        rows = context.get_per_replica_batch_size(2 * context.num_replicas_in_sync)
        count = 3 - (context.input_pipeline_id == context.num_input_pipelines - 1)
        value = 1.0 + context.input_pipeline_id
        return [np.full((rows, 1), value, "float32") for _ in range(count)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    steps = []
    for x in dataset:
        rows = strategy.gather(x, axis=0)
        mean = strategy.reduce("mean", x, axis=0)
        steps.append([*keras.ops.convert_to_numpy(rows)[:, 0], float(mean[0])])
    return {"contexts": contexts, "steps": steps}


def inputs_of_many_kinds(alone: bool = False) -> list[np.ndarray]:
    """Fits a PyDataset, a DataLoader and a tf.data.Dataset, one after the other."""
    import tensorflow as tf
    import torch

    keras.utils.set_random_seed(17)
    strategy, scope = in_charge(alone)
    with scope:
        # Without slots: a difference of rounding is not magnified.
        model = classifier(keras.optimizers.SGD(0.1))
    x, y = digits(29)
    # Keras seeds torch where it is the backend. The chief's seed is what counts.
    rank = 0 if alone else strategy.extended.local_replicas.start
    torch.manual_seed(17 + rank)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    model.fit(Batches(), shuffle=True, verbose=0)
    model.fit(torch.utils.data.DataLoader(tensors, batch_size=8, shuffle=True))
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat(2), verbose=0)
    return weights(model)


@contextlib.contextmanager
def agreements(strategy: Any) -> Iterator[list[str]]:
    """Record the questions that workers send to the chief."""
    member = strategy.extended.cluster.client
    asked: list[str] = []
    agree = member.exchange

    def noted(operation, *arguments):
        if operation != "logs":  # torch sums those of a batch so
            asked.append(operation)
        return agree(operation, *arguments)

    member.exchange = noted
    try:
        yield asked
    finally:
        del member.exchange
