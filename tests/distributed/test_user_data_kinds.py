"""Recognition of a worker's local rows, and the errors for other data."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.distributed.input_jobs import Rows, model_of, weights_of
from tests.distributed.jobs import digits
from tests.distributed.test_training import equal

ROWS, OWN = 12, 3  # of an epoch, and of a worker's batch
STRIDED = [[[0, 2, 4], [1, 3, 5]], [[6, 8, 10], [7, 9, 11]]]
HALVES = [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
# Which rows each worker has in each step.
KINDS = {
    "shard": STRIDED,
    "FILE": STRIDED,
    "HINT": STRIDED,
    "sampler": STRIDED,
    "sampler of processes": STRIDED,
    "grain": HALVES,
    "grain slice": STRIDED,
}


def _kind(name: str, rank: int, folder: str) -> Any:
    """A worker's data."""
    import grain
    import tensorflow as tf
    import torch

    x, y = digits(ROWS)
    rows = [(x[i], y[i]) for i in range(ROWS)]

    def of_numbers(numbers, batch):
        numbers = numbers.batch(batch)
        return numbers.map(lambda i: (tf.gather(x, i), tf.gather(y, i)))

    def with_policy(dataset):
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy[name]
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)

    if name == "shard":
        return of_numbers(tf.data.Dataset.range(ROWS).shard(2, rank), OWN)
    if name == "HINT":
        hint = tf.data.experimental.SHARD_HINT
        numbers = tf.data.Dataset.range(ROWS).shard(hint, hint)
        return with_policy(of_numbers(numbers, 2 * OWN))
    if name == "FILE":
        files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
        lines = files.interleave(tf.data.TextLineDataset, cycle_length=1)
        numbers = lines.map(lambda line: tf.strings.to_number(line, tf.int64))
        return with_policy(of_numbers(numbers, 2 * OWN))
    if name.startswith("sampler"):
        sampler = torch.utils.data.DistributedSampler(rows, 2, rank, shuffle=False)
        processes: dict[str, Any] = {}
        if name == "sampler of processes":
            processes = {"num_workers": 1, "persistent_workers": True}
            processes["pin_memory"] = True
        loader = torch.utils.data.DataLoader
        return loader(rows, batch_size=OWN, sampler=sampler, **processes)
    if name == "grain slice":
        return grain.MapDataset.source(rows)[rank::2].batch(OWN)
    if keras.backend.backend() == "jax":
        shard = grain.sharding.ShardByJaxProcess()
    else:
        shard = grain.sharding.ShardOptions(rank, 2)
    return grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.IndexSampler(ROWS, shard, num_epochs=1),
        operations=[grain.transforms.Batch(OWN)],
        worker_count=0,
    )


def write_files(folder: Path) -> None:
    """Writes what "FILE" reads: a file for each worker."""
    for rank in range(2):
        numbers = [i for step in STRIDED for i in step[rank]]
        (folder / f"{rank}.txt").write_text("".join(f"{i}\n" for i in numbers))


def what_others_share(folder: str = "", alone: bool = False) -> dict:
    """Fits one kind after the other; evaluates and predicts one of them."""
    strategy, model = model_of(alone)
    x, y = digits(ROWS)
    rank = 0 if alone else strategy.extended.cluster.rank
    result: dict[str, Any] = {}

    def joined(steps):
        rows = [np.concatenate(step) for step in steps]
        return ks.IndexedDataset([(x[i], y[i]) for i in np.concatenate(rows)], 2 * OWN)

    for name, steps in KINDS.items():
        data = joined(steps) if alone else _kind(name, rank, folder)
        model.fit(data, verbose=0, shuffle=False)
        loss = model.evaluate(data, verbose=0)
        result[name] = [*weights_of(model), loss]
    if alone:
        own = [np.concatenate([step[r] for step in STRIDED]) for r in range(2)]
        parts = [model.predict(x[rows], verbose=0) for rows in own]
        return {**result, "own": parts, "all": np.concatenate(parts)}
    data = _kind("sampler", rank, folder)
    result["own"] = model.predict(data, verbose=0)
    result["all"] = ks.predict(model, data, gather=True, verbose=0)
    result["not twice"] = ks.predict(model, x, gather=True, verbose=0)
    return result


def until_the_first_ends(alone: bool = False) -> list:
    """Worker 0 has 3 batches and worker 1 has 1: an epoch of one step."""
    strategy, model = model_of(alone)
    x, y = digits(8)
    if alone:
        model.fit(x[:4], y[:4], batch_size=4, shuffle=False, verbose=0)
        return weights_of(model)
    rank = strategy.extended.cluster.rank
    starts = [0, 4, 6] if rank == 0 else [2]
    batches = [(x[i : i + 2], y[i : i + 2]) for i in starts]
    options = ks.InputOptions(auto_shard_policy="OFF", end_with_first_worker=True)
    data = strategy.experimental_distribute_dataset(batches, options)
    model.fit(data, verbose=0)
    assert len(list(data)) == 1
    return weights_of(model)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Record the logger's messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("keras_strategy")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class OtherNoise:
    """Rows that nobody reads twice."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x, y = (array[index] for array in digits(ROWS))
        return x + np.random.default_rng().normal(size=x.shape).astype(x.dtype), y


def what_is_said() -> dict:
    """Return the errors of workers that read equal rows, all rows, or other sources."""
    import tensorflow as tf
    import torch

    strategy, model = model_of(alone=False)
    rank = strategy.extended.cluster.rank
    x, y = digits(ROWS)
    result = {}

    def fitted(name, data):
        with said() as result[name]:
            model.fit(data, verbose=0)
            model.fit(data, verbose=0)

    batches = [(x[:4], y[:4]), (x[4:8], y[4:8])]
    fitted("arrays", ks.IndexedDataset(Rows(), 4, drop_remainder=True))
    # Rows of zeros, as padding has, are on both workers.
    own = [(x[rank::2], y[rank::2]), (np.zeros_like(x[:4]), y[:4] * 0)]
    fitted("own", strategy.distribute_datasets_from_function(lambda _: own))
    fitted("same", strategy.distribute_datasets_from_function(lambda _: batches))
    fitted("stream", tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    declared = ks.row_independent(OtherNoise())
    fitted("declared", ks.IndexedDataset(declared, 4, drop_remainder=True))
    part = torch.utils.data.TensorDataset(*map(torch.tensor, (x[rank::2], y[rank::2])))
    for data in (
        torch.utils.data.DataLoader(part, batch_size=4),
        ks.IndexedDataset(part, 4),
        ks.IndexedDataset(OtherNoise(), 4),
    ):
        before = weights_of(model)
        with pytest.raises(ValueError, match="AutoShardPolicy.OFF") as raised:
            model.fit(data, verbose=0)
        result.setdefault("part", []).append(str(raised.value))
        for weight, same in zip(weights_of(model), before, strict=True):
            np.testing.assert_array_equal(weight, same)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=rank)
    with pytest.raises(ks.errors.WorkerInputError) as raised:
        model.fit(shuffled.batch(4), verbose=0)
    result["shuffled"] = [str(raised.value)]
    numbers = tf.data.Dataset.from_tensor_slices((x, y)).shard(3, rank).batch(2)
    try:
        model.fit(numbers, verbose=0)
    except ValueError as error:
        result["wrong"] = [str(error)]
    return result


HAS_TENSORFLOW, HAS_TORCH, HAS_GRAIN = [
    importlib.util.find_spec(name) is not None
    for name in ("tensorflow", "torch", "grain")
]
needs_libraries = pytest.mark.skipif(
    not (HAS_TENSORFLOW and HAS_TORCH), reason="reads what TensorFlow and torch share"
)
needs_grain = pytest.mark.skipif(not HAS_GRAIN, reason="reads with grain")


@pytest.fixture(scope="module")
def results(in_turns, tmp_path_factory):
    """Return each worker's results."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    calls = {"ended": (until_the_first_ends, {})}
    if HAS_TENSORFLOW and HAS_TORCH:
        calls["said"] = what_is_said, {}
        if HAS_GRAIN:
            calls["shared"] = what_others_share, {"folder": str(folder)}
    return in_turns(**calls)[0]


@pytest.mark.full
@needs_grain
@needs_libraries
def test_fit_with_users_data_kinds(results):
    expected = what_others_share(alone=True)
    for rank, result in enumerate(results["shared"]):
        for name in KINDS:
            assert equal(result[name], expected[name], 2e-5), name
        np.testing.assert_allclose(result["own"], expected["own"][rank], atol=2e-5)
        np.testing.assert_allclose(result["all"], expected["all"], atol=2e-5)
        assert len(result["not twice"]) == ROWS


@pytest.mark.full(keep_on="torch")
def test_training_ends_with_first_exhausted_worker(results):
    expected = until_the_first_ends(alone=True)
    for result in results["ended"]:
        assert equal(result, expected, 2e-5)


@needs_libraries
def test_shared_data_is_reported(results):
    chief, other = results["said"]
    errors = ("wrong", "part", "shuffled")
    assert not any(messages for name, messages in other.items() if name not in errors)
    assert chief["arrays"] == chief["own"] == []
    (same,) = chief["same"]
    assert "All workers read the same rows; with 2 workers that trains each" in same
    (stream,) = chief["stream"]
    assert "reads all rows of this data" in stream and "IndexedDataset" in stream
    assert chief["declared"] == []
    for result in (chief, other):
        for message in result["part"]:
            assert "Received different rows or values" in message
        (message,) = result["shuffled"]
        assert message.index("a seed is missing") < message.index("AutoShardPolicy.OFF")
        assert "must give shard r of 2" in result["wrong"][0]
