"""Functions that workers run, and that return what they have read."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.distributed.jobs import digits, in_charge


@ks.row_independent  # which a counter cannot prove
class Rows:
    """29 rows that count how often one of them is read.

    Args:
        noise: Whether a row draws random numbers when it is read.
    """

    def __init__(self, noise: bool = False):
        self.x, self.y = digits(29)
        self.noise = noise
        self.read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> tuple[np.ndarray, np.ndarray]:
        self.read += 1
        x = self.x[index]
        if self.noise:
            x = x + np.random.normal(size=x.shape).astype("float32")
        return x, self.y[index]


def model_of(alone: bool) -> tuple[Any, keras.Model]:
    """A strategy and a model without slots, where no rounding is magnified."""
    keras.utils.set_random_seed(17)
    strategy, scope = in_charge(alone)
    with scope:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return strategy, model


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """A copy of the weights."""
    return [np.array(value) for value in model.get_weights()]


def loaders(alone: bool = False) -> dict:
    """Fits, evaluates and predicts what a torch DataLoader reads, row by row."""
    import torch

    strategy, model = model_of(alone)
    torch.manual_seed(17)
    rows, noisy = Rows(), Rows(noise=True)

    @ks.row_independent
    def collate(items):
        x, y = zip(*items, strict=True)
        return torch.tensor(np.stack(x)) * 2, torch.tensor(np.stack(y))

    def loader(dataset, **kwargs):
        return torch.utils.data.DataLoader(dataset, batch_size=8, **kwargs)

    shuffled = loader(rows, shuffle=True, collate_fn=collate)
    read, results = {}, {}

    def note(name, dataset, result):
        read[name] = dataset.read
        results[name] = [*weights_of(model), *result]
        dataset.read = 0

    model.fit(shuffled, verbose=0)
    note("first", rows, [])
    history = model.fit(shuffled, epochs=2, verbose=0).history["loss"]
    note("fit", rows, [history])
    in_order = loader(rows)
    note("evaluate", rows, [model.evaluate(in_order, verbose=0)])
    note("predict", rows, [model.predict(in_order, verbose=0)])
    model.fit(loader(noisy, shuffle=True), epochs=2, verbose=0)
    note("noisy", noisy, [])
    indexed = ks.IndexedDataset(rows, batch_size=8, shuffle=True)
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    model.fit(indexed, epochs=2, class_weight=weights, verbose=0)
    note("indexed", rows, [])
    model.fit(shuffled, verbose=0)
    note("after", rows, [])
    if not alone:
        parts = []
        for x, _ in strategy.experimental_distribute_dataset(in_order):
            parts.append(keras.ops.convert_to_numpy(strategy.gather(x, axis=0)))
        note("loop", rows, [np.concatenate(parts)])
        for x, _ in strategy.experimental_distribute_dataset(indexed):
            parts.append(strategy.experimental_local_results(x))
        note("indexed loop", rows, [])
    return {"read": read, "results": results}


def skip_batches(native: bool = False) -> dict:
    """Return the errors of workers that skip different batches of their loops."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start

    def step(x):
        total = keras.ops.sum(x)
        return ks.get_replica_context().all_reduce("SUM", total)

    data: Any = [np.full(4, i, "float32") for i in range(4)]
    if native:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(np.stack(data))
    dataset = strategy.experimental_distribute_dataset(data)
    totals = []
    for _ in range(2):
        for x in itertools.islice(dataset, 1, None, 2):
            total = strategy.run(step, (x,))
            totals.append(float(strategy.experimental_local_results(total)[0]))
    steps = 0
    with pytest.raises(ks.errors.WorkersDifferError) as error:
        for number, x in enumerate(dataset):
            if number != 2 - rank:
                strategy.run(step, (x,))
                steps += 1
    return {"equal": totals, "steps": steps, "error": str(error.value)}


def policies(folder: str) -> dict:
    """Return what each worker reads of sharded data, and the warnings."""
    import tensorflow as tf
    import torch

    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    pattern = f"{folder}/*.txt"

    def read(dataset, policy=None):
        options = policy and ks.InputOptions(auto_shard_policy=policy)
        try:
            batches = strategy.experimental_distribute_dataset(dataset, options)
            parts = [strategy.experimental_local_results(x) for x in batches]
        except ValueError as error:
            return str(error)
        return [[float(x) for x in part] for (part,) in parts]

    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    lines = files.interleave(tf.data.TextLineDataset, cycle_length=1)
    lines = lines.map(tf.strings.to_number).batch(4)
    options = tf.data.Options()
    native = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = native.FILE
    hint = tf.data.experimental.SHARD_HINT
    hinted = tf.data.Dataset.range(8).shard(hint, hint).batch(4)

    rows = [torch.tensor(float(i)) for i in range(7)]

    def sampled(replicas):
        sampler = torch.utils.data.DistributedSampler(rows, replicas, rank, False)
        return torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler)

    with strategy.scope():
        names = ks.files(pattern)
    return {
        "file": read(lines, "FILE"),
        "options": read(lines.with_options(options)),
        "hint": read(hinted, "HINT"),
        "data": read(lines, "DATA"),
        "sampler": read(sampled(2)),
        "wrong": read(sampled(3)),
        "list": read([np.zeros(2)], "FILE"),
        "names": [name.rpartition("/")[2] for name in names],
    }
