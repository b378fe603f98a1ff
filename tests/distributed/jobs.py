"""What workers do in these tests: functions that a fresh process imports and calls.

Each returns NumPy arrays and numbers alone. Where `alone` is true it does the same on
one device, in this process: what the workers must equal.
"""

import contextlib
import importlib.util
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.sockets import listening_addresses
from tests.processes import wait_until

# On JAX and TensorFlow, Keras exports models with it.
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
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
    """What functions return, one after the other in one process.

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
    """Calls functions of a user's own with what all replicas have."""

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
    """What replicas on different workers tell each other."""
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
    """A loop of one's own over a distributed dataset with a last batch of 5 rows."""
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


def only_the_first_counts() -> list[float]:
    """Reads a variable of which all replicas but the first hold infinity."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = keras.Variable(
            0.0, synchronization="on_read", aggregation="only_first_replica"
        )

    def step():
        context = ks.get_replica_context()
        first = keras.ops.equal(context.replica_id_in_sync_group, 0)
        v.assign(keras.ops.where(first, 1.0, np.inf))
        return context.merge_call(lambda strategy: v + 0.0)

    read = strategy.run(step, options=ks.RunOptions(compile=False))
    inside = strategy.experimental_local_results(read)[0]
    return [float(inside), float(keras.ops.convert_to_numpy(v))]


def tracked_collectives() -> list[str]:
    """Return the operation in which each collective reports a failed worker."""
    strategy = ks.MultiWorkerMirroredStrategy()
    workers, names = strategy.extended.group.workers, []
    value = keras.ops.ones((2,))
    for collective in (
        lambda: workers.sum("a sum", value),
        lambda: workers.sum_all("two sums", [value, value]),
        lambda: workers.gather("rows", value, 0),
        lambda: workers.broadcast("a value", [value]),
    ):
        collective()
        names.append(strategy.extended.cluster.client.trace.last)
    return names


def different_shapes() -> str:
    """A collective of values of different shapes on the workers."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    value = np.ones((2 + rank,), "float32")
    out = strategy.experimental_distribute_values_from_function(lambda _: value)
    try:
        strategy.reduce("sum", out, axis=None)
    except ValueError as error:
        return str(error)
    return "no error"


def gathered_dtypes() -> dict:
    """Gathers values of dtypes that not every library of collectives knows."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    gathered = {}
    for dtype in ("bool", "int16", "float16"):
        rows = keras.ops.convert_to_tensor(np.arange(2 * rank, 3).astype(dtype))
        value = strategy.experimental_distribute_values_from_function(
            lambda _, rows=rows: rows
        )
        joined = keras.ops.convert_to_numpy(strategy.gather(value, axis=0))
        gathered[dtype] = str(joined.dtype), joined.astype(int).tolist()
    return gathered


def write_everything(folder: str, epochs: int = 3) -> dict:
    """Trains with callbacks that write, and saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    path = pathlib.Path(folder)
    path.mkdir(exist_ok=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(path / "best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            str(path / "epoch{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.CSVLogger(path / "log.csv"),
        keras.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False),
    ]
    x, y = digits(29)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        validation_data=digits(7, seed=4),
        callbacks=callbacks,
        verbose=2,
    )
    model.save(path / "last.keras")
    return {
        "weights": weights(model),
        "epochs": history.epoch,
        "predicted": model.predict(x, verbose=0),
    }


def stop_by_some(folder: str) -> list[int]:
    """Return the numbers of batches of `fit`, of which some workers want fewer."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start

    class Stop(keras.callbacks.Callback):
        batches = 0

        def __init__(self, ranks, wanted):
            super().__init__()
            self.wanted = wanted if rank in ranks else 1000

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches >= self.wanted:
                self.model.stop_training = True

    with strategy.scope():
        model = classifier()
    x, y = digits(29)
    stops = [Stop([1], 6), Stop([0, 1], 6), Stop([1], 8)]
    for stop in stops:
        model.fit(x, y, batch_size=8, epochs=5, callbacks=[stop], verbose=0)
    return [stop.batches for stop in stops]


class Seen(keras.layers.Layer):
    """Counts the rows that it has seen: each replica its own, until somebody reads."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = keras.Variable(
            0.0, trainable=False, aggregation="sum", synchronization="on_read"
        )

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


def bytes_written(folder: str) -> dict:
    """What this worker writes to files while all of them save 1 MB.

    Returns:
        By what saved it: the bytes, and whether the temporary folder was used.
    """
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    tempfile.tempdir = str(pathlib.Path(folder, f"temporary{rank}"))
    os.mkdir(tempfile.tempdir)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), Seen(), keras.layers.Dense(4096), Seen()]
        )
        model.compile("sgd", "mse")
    written = {}

    @contextlib.contextmanager
    def counted(name):
        before = _bytes_written(), os.stat(tempfile.gettempdir()).st_mtime_ns
        yield
        used = os.stat(tempfile.gettempdir()).st_mtime_ns != before[1]
        written[name] = _bytes_written() - before[0], used

    path = pathlib.Path(folder)
    x, y = np.ones((4, 64), "float32"), np.ones((4, 4096), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    with counted("save"), strategy.scope():
        model.save(path / "model.keras")
    with counted("save_weights"):
        model.save_weights(path / "model.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path / "checkpoint.keras")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[checkpoint])
    with counted("ModelCheckpoint"):
        checkpoint.on_epoch_end(1, {})
    # On torch, Keras exports nothing by itself.
    if keras.backend.backend() != "torch" and HAS_TENSORFLOW:
        with strategy.scope():
            plain = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096)])
        plain(x)
        with counted("export"):
            plain.export(path / "exported", verbose=False)
    rows = float(model.layers[0].rows.value)
    return {"written": written, "rows": rows, "weights": model.get_weights()}


def _bytes_written() -> int:
    """The bytes of all calls of `write` of this process."""
    with open("/proc/self/io") as file:
        return int(file.read().split("wchar:")[1].split()[0])


def save_where_nobody_can(folder: str) -> dict[str, str]:
    """The chief cannot write; what is raised on each worker, by what saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    place = pathlib.Path(folder) / "a_file"
    place.touch()
    said = {}
    for name, file in (
        ("save", "model.keras"),
        ("save_weights", "model.weights.h5"),
        ("export", "exported"),
    ):
        try:
            getattr(model, name)(place / file)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
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
    """What the workers ask each other by way of the chief meanwhile."""
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


def rounds() -> dict:
    """How often workers ask each other, to make models and to run functions."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    result: dict[str, Any] = {}
    keras.utils.set_random_seed(17)
    with agreements(strategy) as result["the same values"], strategy.scope():
        classifier()
    keras.utils.set_random_seed(17 + rank)
    with agreements(strategy) as result["other values"], strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    result["weights"] = [keras.ops.convert_to_numpy(v) for v in model.variables]
    with strategy.scope():
        first = keras.Variable(np.float32(5 + rank))
        if rank == 1:
            # What one worker reads, or computes from it, is the chief's already.
            result["read"] = float(first) + 0.0
        second = keras.Variable(np.float32(7 + rank))
        first.assign_add(1)
    result["variables"] = [float(first), float(second)]

    def step(x, y):
        def loss_fn(x, y):
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model(x), from_logits=True
                )
            )

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)(x, y)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    # Of 7 rows, the first of two workers has 4, as of 8.
    batches = [digits(8), digits(8), digits(8), digits(7), digits(8)]
    result["steps"], losses = [], []
    for x, y in strategy.experimental_distribute_dataset(batches):
        with agreements(strategy) as asked:
            loss = strategy.run(step, args=(x, y))
            losses.append(float(strategy.reduce("mean", loss)))
        result["steps"].append(asked)
    result["losses"] = losses
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    model.train_on_batch(*batches[0])
    with agreements(strategy) as result["a batch"]:
        model.train_on_batch(*batches[1])
    result["told"] = [batches_told(strategy, takes) for takes in (None, False, True)]
    result["read by one"] = losses_of_batches(strategy, reads=rank == 1)
    return result


def batches_told(strategy: Any, batches: bool | None) -> tuple[int, int]:
    """How often `fit` of 3 batches tells of one, which reads its logs, and asks of it.

    Args:
        strategy: The strategy.
        batches: Whether a callback of one's own takes batches, or epochs; None without.
    """
    with strategy.scope():
        model = classifier()
    told: list[int] = []
    when = "on_train_batch_end" if batches else "on_epoch_end"
    own = keras.callbacks.LambdaCallback(**{when: lambda number, logs: dict(logs)})
    original = keras.callbacks.CallbackList.on_train_batch_end

    def counted(self, batch, logs=None):
        told.append(batch)
        original(self, batch, logs)

    keras.callbacks.CallbackList.on_train_batch_end = counted
    try:
        with agreements(strategy) as asked:
            callbacks = [] if batches is None else [own]
            x, y = digits(24)
            model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    finally:
        keras.callbacks.CallbackList.on_train_batch_end = original
    return len(told), asked.count("whether to stop")


def losses_of_batches(strategy: Any, reads: bool) -> tuple[list[float], int]:
    """Return what a callback for batches reads in 2 epochs, and how often workers ask.

    Args:
        strategy: The strategy.
        reads: Whether this worker has the callback.
    """
    with strategy.scope():
        model = classifier()
    losses: list[float] = []
    reader = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    callbacks = [reader] if reads else []
    with agreements(strategy) as asked:
        x, y = digits(24)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    return losses, asked.count("whether the logs of batches are read")


def different_programs(folder: str) -> None:
    """Two workers go different ways after a step that both know.

    They have little time for each other, and take none of it to start.
    """
    make = ks.MultiWorkerMirroredStrategy  # it has imported what it needs
    pathlib.Path(folder, str(os.getpid())).touch()
    wait_until(lambda: len(os.listdir(folder)) == 2, seconds=240)
    strategy = make()
    rank = strategy.extended.local_replicas.start

    def step():
        return ks.get_replica_context().all_reduce("sum", keras.ops.ones(()))

    for _ in range(2):
        total = strategy.run(step)
    if rank == 0:
        total = strategy.run(step)
        print(float(strategy.experimental_local_results(total)[0]))
    else:
        strategy.gather(strategy.run(lambda: keras.ops.ones((1,))), axis=0)


def fits_that_differ() -> dict[str, str]:
    """What is said where worker 1 is about to train something else; it trains alike."""
    import pandas

    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0
    x, y = digits(8)

    def schedule(epoch, rate):
        return 0.5 * rate

    def made(optimizer, activation=None, loss=None):
        with strategy.scope():
            if last:
                keras.layers.Dense(1)  # after which names count on
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, activation=activation),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(
                optimizer, loss or keras.losses.SparseCategoricalCrossentropy(True)
            )
        return model

    def said(optimizer, activation=None, mine=(x, y), loss=None, **arguments):
        arguments = {"epochs": 1, "verbose": 2 * last, **arguments}
        return told(made(optimizer, activation, loss).fit, *mine, **arguments)

    def said_of_words(words):
        class Words(keras.layers.Dense):
            def __init__(self):
                super().__init__(3)
                self.lookup = keras.layers.StringLookup()

        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), Words()])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
        model.layers[0].lookup.adapt(np.array(words))
        return told(model.fit, x, y, verbose=0)

    def told(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except (ks.errors.WorkersDifferError, ks.errors.WorkerInputError) as error:
            return str(error)
        return "no error"

    def with_epsilon(call):
        keras.config.set_epsilon(1e-3 if last else 1e-7)
        try:
            return call()
        finally:
            keras.config.set_epsilon(1e-7)

    sgd = keras.optimizers.SGD
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: dict(logs)
    )
    rates = keras.callbacks.LearningRateScheduler(schedule)
    stop = keras.callbacks.EarlyStopping("loss", patience=2 + last)
    other = x + last * (np.arange(8) == 3)[:, None]
    tensor, frame = keras.ops.convert_to_tensor(other), pandas.DataFrame(other)
    words = np.array([["a"], ["b" if last else "c"]], object)
    large = np.zeros((60_000, 6), "float32")  # more than is read of it
    large[-6_000:] = last
    model = made(sgd())
    on_batch = model.train_on_batch, model.test_on_batch, model.predict_on_batch
    return {
        "beta": said(keras.optimizers.Adam(beta_1=0.5 if last else 0.9)),
        "clipnorm": said(sgd(clipnorm=1.0 if last else None)),
        "class": said(sgd() if last else keras.optimizers.Adam()),
        "loss": said(sgd(), loss=_loss_of_last if last else _loss_of_first),
        "layer": said(sgd(), activation="tanh" if last else "relu"),
        "schedule": said(sgd(), callbacks=[rates] if last else []),
        "patience": said(sgd(), callbacks=[stop]),
        "epochs": said(sgd(), epochs=1 + last),
        "arrays": said(sgd(), mine=(other, y)),
        "tensors": said(sgd(), mine=(tensor, y)),
        "tables": said(sgd(), mine=(frame, y)),
        "words": said(sgd(), mine=(words, y[:2])),
        "large": said(sgd(), mine=(large, large[:, 0])),
        "weights": said(sgd(), sample_weight=tensor[:, 0]),
        "validation": said(sgd(), validation_data=(tensor, y)),
        "epsilon": with_epsilon(lambda: said(sgd())),
        "evaluate": told(model.evaluate, other, y),
        "predict": told(model.predict, frame),
        **{call.__name__: told(call, other) for call in on_batch},
        "rows": told(model.train_on_batch, x[: 4 + last], y[: 4 + last]),
        "Keras's": with_epsilon(lambda: told(model.evaluate, x, y)),
        "vocabulary": said_of_words(["a", "c" if last else "b"]),
        "batches": said(sgd(), mine=(((a, y) for a in [other, x]),)),
        # What may differ.
        "watch": said(sgd(), callbacks=[] if last else [watch], epochs=2),
        "rate": said(sgd(0.1 if last else 0.2)),
        "same vocabulary": said_of_words(["a", "b"]),
        "kinds": said(sgd(), mine=(pandas.DataFrame(x) if last else x, y)),
        "batch": told(model.train_on_batch, x, y),
    }


def _loss_of_first(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def _loss_of_last(y, p):
    return 2 * _loss_of_first(y, p)


def drifts(folder: str) -> dict[str, list[str]]:
    """Worker 1 changes a weight in the second epoch; what finds it, by what saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0
    savers = {
        "nothing": [],
        "checkpoint": [keras.callbacks.ModelCheckpoint(f"{folder}/best.keras")],
        "backup": [ks.callbacks.BackupAndRestore(f"{folder}/backup")],
    }
    results = {}
    for name, callbacks in savers.items():
        with strategy.scope():
            model = classifier()
        kernel = model.layers[-1].kernel

        def change(epoch, logs, kernel=kernel):
            if last and epoch == 1:
                kernel.assign(keras.ops.convert_to_numpy(kernel) + 1e-3)

        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, seen=seen: seen.append(epoch),
            on_epoch_end=change,
        )
        told = "no error"
        with agreements(strategy) as asked:
            try:
                model.fit(
                    *digits(8), epochs=3, callbacks=[callback, *callbacks], verbose=0
                )
            except ks.errors.WorkersDifferError as error:
                told = str(error)
        ends = [name for name in asked if name == "the end of an epoch"]
        results[name] = [told, str(seen), str(len(ends))]
    return results


def chief_predicts_alone() -> None:
    """A callback of the chief alone has all workers wait."""
    strategy = ks.MultiWorkerMirroredStrategy()
    chief = strategy.extended.local_replicas.start == 0
    with strategy.scope():
        model = classifier()
    x, y = digits(8)

    def alone(batch, logs):
        with strategy.extended.cluster.client.track_operation(
            "what the chief waits for"
        ):
            time.sleep(100)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=alone)
    model.fit(x, y, callbacks=[callback] if chief else [], verbose=0)
