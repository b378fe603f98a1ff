"""Workers notice that they are about to send different things, and send no more."""

import hashlib
import random
import threading

import keras
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

import keras_strategy as ks  # noqa: E402
from keras_strategy.backends.torch.collective_check import CollectiveVerifier  # noqa: E402
from keras_strategy.core.collectives import (  # noqa: E402
    CHECKSUM_BYTES,
    CHECKSUM_TAIL,
)
from keras_strategy.testing import WorkerRunner  # noqa: E402

WORKERS = 3


class Done:
    """A collective that has ended."""

    def wait(self):
        """There is nothing to wait for."""


class Collectives:
    """Threads in the place of workers: sizes that differ are an error."""

    def __init__(self):
        self.given = [None] * WORKERS
        self.barrier = threading.Barrier(WORKERS, timeout=120)
        self.count = 0

    def all_reduce(self, rank):
        def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, *, async_op=False):
            self.given[rank] = (tensor.clone(), op)
            if self.barrier.wait() == 0:
                self.count += 1
            tensors = [t for t, _ in self.given]
            assert len({(t.shape, t.dtype) for t in tensors}) == 1
            assert len({op for _, op in self.given}) == 1
            stacked = torch.stack(tensors)
            largest = op == torch.distributed.ReduceOp.MAX
            tensor.copy_(stacked.amax(0) if largest else stacked.sum(0))
            self.barrier.wait()
            return Done()

        return all_reduce


def of_all(act):
    """Return each worker's result of `act(verifier, rank)`, and the collectives."""
    collectives = Collectives()
    results = [None] * WORKERS

    def worker(rank):
        try:
            verifier = CollectiveVerifier(WORKERS, collectives.all_reduce(rank))
            results[rank] = act(verifier, rank)
        except BaseException as error:
            collectives.barrier.abort()
            results[rank] = error

    threads = [threading.Thread(target=worker, args=(r,)) for r in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results, collectives.count


def add(verifier, size, rank=0, dtype="float32", kind="sum"):
    buffer = torch.full((size + CHECKSUM_TAIL,), rank + 1, dtype=getattr(torch, dtype))
    text = f"{kind} {size} {dtype}".encode()
    digest = hashlib.blake2b(text, digest_size=CHECKSUM_BYTES).digest()
    if kind != "sum":
        return verifier.verify(digest, torch.device("cpu"))
    same = verifier.sum_in_place(digest, buffer, [size])
    return buffer[:-CHECKSUM_TAIL] if same else None


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_repeated_collectives_are_sent_at_once(dtype):
    def act(verifier, rank):
        return [add(verifier, 5, rank, dtype).tolist() for _ in range(10)]

    results, count = of_all(act)
    assert results == [[[6] * 5] * 10] * WORKERS
    assert count == 2 + 2 + 8  # the first two times there is nothing to expect


def test_alternating_collectives_are_sent_at_once():
    def act(verifier, rank):
        for _ in range(10):
            add(verifier, 5, rank)
            add(verifier, 3, rank)

    _, count = of_all(act)
    assert count == 2 * 3 + 17


def test_rare_collective_keeps_the_pattern():
    def act(verifier, rank):
        for _ in range(4):
            for _ in range(6):
                add(verifier, 5, rank)  # the steps of an epoch
            add(verifier, 3, rank)  # its logs

    _, count = of_all(act)
    # What comes after each of the three is learned once. Then an epoch has 7 sums, and
    # one more where the logs come.
    assert count == 4 * 7 + 3 + 4


def test_small_dtype_cannot_carry_checksum():
    def act(verifier, rank):
        return [add(verifier, 5, rank, "bfloat16").tolist() for _ in range(3)]

    results, count = of_all(act)
    assert results == [[[6] * 5] * 3] * WORKERS
    assert count == 2 * 3


@pytest.mark.parametrize("odd", range(WORKERS))
@pytest.mark.parametrize(
    "other",
    [(4, "float32", "sum"), (5, "float64", "sum"), (5, "float32", "gather")],
    ids=["size", "dtype", "operation"],
)
def test_differing_worker_is_reported(other, odd):
    size, dtype, kind = other

    def act(verifier, rank):
        for _ in range(3):
            add(verifier, 5, rank)
        if rank == odd:
            noticed = not add(verifier, size, rank, dtype, kind)
        else:
            noticed = add(verifier, 5, rank) is None
        return noticed, add(verifier, 5, rank).tolist()

    results, _ = of_all(act)
    assert results == [(True, [6] * 5)] * WORKERS  # and it can go on


def assert_differences_noticed(results):
    """Assert that all workers notice each step in which they differ, and no other."""
    for step in zip(*results, strict=True):
        is_same = len({what for _, what in step}) == 1
        assert [noticed_same for noticed_same, _ in step] == [is_same] * WORKERS


@pytest.mark.parametrize("seed", range(5))
def test_random_collective_sequences_are_verified(seed):
    """Sizes are always the same, and a difference is noticed by all."""

    def act(verifier, rank):
        shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
        seen = []
        for _ in range(200):
            size = shared.choice([1, 2, 2, 2, 3])
            dtype = shared.choice(["float32", "float32", "int64", "float16"])
            kind = shared.choice(["sum", "sum", "sum", "gather"])
            if shared.random() < 0.2:
                size = own.choice([1, 2, 3])
            result = add(verifier, size, rank, dtype, kind)
            same = result is not None and result is not False
            if kind == "sum" and same:
                assert result.tolist() == [6] * size
            seen.append((same, size))
        return seen

    results, _ = of_all(act)
    assert_differences_noticed(results)


def sum_few_numbers() -> list[list]:
    """Sum values of all workers, some of which floats of 64 bits would round."""
    workers = ks.MultiWorkerMirroredStrategy().extended.group.workers
    rank = workers.rank
    tensors = [
        torch.tensor([1.5, float("nan"), float("inf"), 0.1]),
        torch.tensor([[2**60 + rank]]),
        torch.tensor(1.5 + rank, dtype=torch.bfloat16),
        torch.tensor(2.0 + 1j),
        torch.full((2000,), 0.25),
    ]
    sums = workers.sum_all("logs", tensors)
    assert [(t.dtype, t.shape) for t in sums] == [(t.dtype, t.shape) for t in tensors]
    with pytest.raises(ValueError, match="the same on"):
        workers.sum_all("logs", [torch.ones(1 + rank)])
    return [total.flatten()[:4].tolist() for total in sums]


def test_few_numbers_are_summed(starter):
    with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
        results = runner.run(sum_few_numbers)
    tenth = float(2 * np.float32(0.1))
    for floats, integer, half, complex_number, many in results:
        assert floats[0] == 3 and np.isnan(floats[1]) and np.isinf(floats[2])
        assert floats[3] == tenth
        assert (integer, half, complex_number) == ([2**61 + 1], [4.0], [4 + 2j])
        assert many == [0.5] * 4
