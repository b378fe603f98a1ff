"""Reads, exchanges and bytes of workers for the rows of a step: counts, no times.

Each kind of data is trained on by `fit`, in a short and in a long epoch. The difference
is what a step takes; what an epoch takes once is not in it.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.speed.counts import count_operations

BATCH = 8  # of all workers
SHORT, LONG = 4, 8


@dataclasses.dataclass(frozen=True)
class InputFigures:
    """Counts of one worker for a step of `fit`.

    Attributes:
        rows_read: The rows that it reads and decodes, in an epoch after the first.
        row_bytes: The bytes of rows that it sends to other workers.
        rounds: How often it waits for the coordinator before it can compute.
        collectives: The collectives of a step, those of its gradients and logs.
    """

    rows_read: float
    row_bytes: float
    rounds: float
    collectives: float


class Watch:
    """Counts what one worker does in the second epoch of a `fit`.

    Args:
        strategy: The strategy of several workers.

    Attributes:
        rows: The rows that were read; who reads them adds them.
        asked: What the worker waited for at the coordinator. Nobody waits for what is
            sent before a step and received after it.
        gathered: For what rows were gathered of all workers, in any epoch.
        row_bytes: The bytes that this worker gave to that.
        callback: A callback for the `fit`.
    """

    def __init__(self, strategy: Any):
        self._member = strategy.extended.cluster.client
        self._workers = type(strategy.extended.group.workers)
        self._step, self._counts = 0, False
        self.rows = self.row_bytes = 0
        self.asked: list[str] = []
        self.gathered: list[str] = []
        self.callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self._begin(epoch),
            on_train_batch_end=lambda batch, logs: self._end_of_step(),
            on_epoch_end=lambda epoch, logs: self._stop(),
        )

    def read(self, rows: int) -> None:
        """Count rows that were read."""
        self.rows += rows

    def _begin(self, epoch: int) -> None:
        self._counts = epoch == 1
        self.rows = 0

    def _end_of_step(self) -> None:
        self._step += 1

    def _stop(self) -> None:
        self._counts = False

    def _note(self, operation: str) -> None:
        # Not of the input: whether a callback stops, and the sums of logs on torch.
        if self._counts and operation not in ("whether to stop", "logs"):
            self.asked.append(operation)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around `fit` that counts."""
        member, workers = self._member, self._workers
        exchange, gather = member.exchange, workers.gather
        start_exchange = member.start_exchange

        def exchange_noted(operation, value=None, *seconds):
            self._note(operation)
            return exchange(operation, value, *seconds)

        def start_exchange_noted(operation, value=None):
            step, answer = self._step, start_exchange(operation, value)

            def wait():
                if self._step == step:
                    self._note(operation)
                return answer()

            return wait

        def gather_noted(this, name, tensor, axis):
            if name != "optimizer.apply":  # the gradient of an embedding, on TensorFlow
                self.gathered.append(name)
                self.row_bytes += np.asarray(tensor).nbytes
            return gather(this, name, tensor, axis)

        member.exchange = exchange_noted
        member.start_exchange = start_exchange_noted
        workers.gather = gather_noted
        try:
            yield
        finally:
            del member.exchange, member.start_exchange
            workers.gather = gather


class CountedArray(np.ndarray):
    """An array that says how many rows are taken out of it."""

    read: Callable[[int], None] | None = None

    def __array_finalize__(self, array: Any) -> None:
        self.read = None  # only the whole array counts

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if self.read is not None:
            self.read(len(part))
        return part.view(np.ndarray)


@ks.row_independent  # which a counter cannot prove
class Rows:
    """A source of rows that can be indexed."""

    def __init__(self, rows: int, read: Callable[[int], None]):
        self._x, self._y = arrays(rows)
        self._read = read

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: Any) -> Any:
        self._read(1)
        return self._x[index], self._y[index]


class Batches(keras.utils.PyDataset):
    """Batches of so many rows of a source."""

    def __init__(self, source: Rows, rows: int):
        super().__init__()
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._source) // self._rows

    def __getitem__(self, index: int) -> Any:
        rows = range(index * self._rows, (index + 1) * self._rows)
        x, y = zip(*(self._source[row] for row in rows), strict=True)
        return np.stack(x), np.stack(y)


def arrays(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of 6 numbers and their targets."""
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    return x, x[:, :1]


def _arrays(strategy, rows, read):
    x, y = arrays(rows)
    x = x.view(CountedArray)
    x.read = read
    return {"x": x, "y": y, "batch_size": BATCH}


def _py_dataset(strategy, rows, read):
    return {"x": Batches(Rows(rows, read), BATCH)}


def _indexed_dataset(strategy, rows, read):
    return {"x": ks.IndexedDataset(Rows(rows, read), BATCH, shuffle=True)}


def _data_loader(strategy, rows, read):
    import torch

    source = Rows(rows, read)
    return {"x": torch.utils.data.DataLoader(source, batch_size=BATCH, shuffle=True)}


def _from_function(strategy, rows, read):
    def dataset_fn(context):
        workers = context.num_input_pipelines
        return Batches(Rows(rows // workers, read), BATCH // workers)

    return {"x": strategy.distribute_datasets_from_function(dataset_fn)}


def _files(strategy, rows, read):
    import tensorflow as tf

    files = strategy.extended.cluster.size
    folder = Path(tempfile.mkdtemp())
    for number in range(files):
        lines = "\n".join("1.0" for _ in range(rows // files))
        (folder / f"{number}.txt").write_text(lines)

    def decoded(line):
        def decode(text):
            read(1)
            return np.full(6, float(text), "float32")

        x = tf.ensure_shape(tf.numpy_function(decode, [line], tf.float32), [6])
        return x, x[:1]

    dataset = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    dataset = dataset.interleave(tf.data.TextLineDataset, cycle_length=1)
    dataset = dataset.map(decoded).batch(BATCH)
    options = ks.InputOptions(auto_shard_policy="FILE")
    return {"x": strategy.experimental_distribute_dataset(dataset, options)}


# Each makes the arguments of a `fit`, of a strategy, the rows of an epoch, and what is
# told when some were read.
KINDS: dict[str, Callable[[Any, int, Callable[[int], None]], dict[str, Any]]] = {
    "arrays": _arrays,
    "PyDataset": _py_dataset,
    "IndexedDataset": _indexed_dataset,
    "torch DataLoader": _data_loader,
    "rows of each worker's own": _from_function,
    "tf.data by files": _files,
}


def figures_of_inputs() -> dict[str, dict[str, float]]:
    """Return the figures of each kind of data, in one of several workers."""
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return {
        kind: dataclasses.asdict(_figures(strategy, model, make))
        for kind, make in KINDS.items()
    }


def _figures(strategy: Any, model: keras.Model, make: Callable) -> InputFigures:
    def train(steps):
        # Without a callback: nobody asks for the logs of a step.
        model.fit(**make(strategy, steps * BATCH, lambda rows: None), verbose=0)

    # Compiles; and on torch, who sums what comes in which order is known after it.
    for _ in range(2):
        train(SHORT)
    collectives = [count_operations(train, steps)[0] for steps in (SHORT, LONG)]
    watched = [_watched(strategy, model, make, steps) for steps in (SHORT, LONG)]
    pairs = [*zip(*watched, strict=True), collectives]
    return InputFigures(*((long - short) / (LONG - SHORT) for short, long in pairs))


def _watched(
    strategy: Any, model: keras.Model, make: Callable, steps: int
) -> tuple[float, ...]:
    """Return the rows, the bytes and the exchanges of an epoch."""
    watch = Watch(strategy)
    data = make(strategy, steps * BATCH, watch.read)
    with watch.watching():
        model.fit(**data, epochs=2, verbose=0, callbacks=[watch.callback])
    return watch.rows, watch.row_bytes / 2, len(watch.asked)
