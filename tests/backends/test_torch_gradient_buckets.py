"""Sums in buckets: all workers send the same buckets."""

import contextlib
import hashlib
import random
from types import SimpleNamespace

import keras
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from keras_strategy.backends.torch.collective_check import (  # noqa: E402
    CollectiveVerifier,
)
from keras_strategy.backends.torch.collectives import TorchWorkers  # noqa: E402
from keras_strategy.backends.torch.gradient_buckets import (  # noqa: E402
    FlatBufferPool,
)
from keras_strategy.core.collectives import (  # noqa: E402
    CHECKSUM_BYTES,
    CHECKSUM_TAIL,
)
from keras_strategy.core.step_state import StepState  # noqa: E402
from tests.backends.test_torch_collective_check import (  # noqa: E402
    WORKERS,
    Done,
    assert_differences_noticed,
    of_all,
)


class Sums:
    """One worker's sums of its number, in buckets, of which some leave early."""

    def __init__(self, verifier, rank):
        self.verifier, self.rank = verifier, rank

    def add(self, early=0, sizes=(2, 3), keeps_sent=True):
        """The sum; None if the workers are in different ones."""
        digest = _digest(sizes)
        buffer = torch.full((sum(sizes) + CHECKSUM_TAIL,), torch.nan)
        self.send(buffer[:-CHECKSUM_TAIL], early, sizes)

        def fill(index, bucket):
            bucket.fill_(self.rank + 1.0)

        if not self.verifier.sum_in_place(digest, buffer, sizes, fill, keeps_sent):
            return None
        return buffer[:-CHECKSUM_TAIL].tolist()

    def send(self, values, early, sizes=(2, 3)):
        """Sends so many buckets if their sum is due."""
        if self.verifier.expects(_digest(sizes)):
            for bucket in values.split(sizes)[:early]:
                self.verifier.send(bucket.fill_(self.rank + 1.0))

    def other(self, kind="gather", early=0):
        """Verify another operation, after some buckets of the sum were sent."""
        self.send(torch.empty(5), early)
        return self.verifier.verify(_digest(kind), torch.device("cpu"))


def _digest(what):
    return hashlib.blake2b(f"{what}".encode(), digest_size=CHECKSUM_BYTES).digest()


def of_sums(act):
    """Return each worker's result of `act(sums)`, and the collectives."""
    return of_all(lambda verifier, rank: act(Sums(verifier, rank)))


SUM = [6.0] * 5


def test_buckets_are_sent_when_expected():
    def act(sums):
        early = [sums.rank % 2, 0, 1, sums.rank % 2]  # each as it likes
        return [sums.add(early) for early in (0, 0, *early)]

    results, count = of_sums(act)
    assert results == [[SUM] * 6] * WORKERS
    # The first two times they compare first.
    assert count == 2 * 3 + 4 * 2


def test_differing_buckets_are_reported():
    def act(sums):
        sums.add()
        return sums.add(sizes=(3, 2) if sums.rank == 1 else (2, 3)), sums.add()

    results, _ = of_sums(act)
    assert results == [(None, SUM)] * WORKERS


@pytest.mark.parametrize("early", [0, 1])
def test_worker_discards_sent_buckets(early):
    def act(sums):
        found = [sums.add() for _ in range(3)]
        for _ in range(3):
            if sums.rank == 1:
                found.append(sums.add(early, keeps_sent=False))
            else:
                found.append(sums.add(1))
            found.append(sums.add(1))
        return found

    results, count = of_sums(act)
    assert results == [[SUM] * 9] * WORKERS
    # The discarded buckets, the comparison, and the sum again.
    assert count == 2 * 3 + 2 + 3 * (5 + 2)


def test_other_operation_discards_sent_buckets():
    def act(sums):
        found = [sums.add() for _ in range(3)]
        for _ in range(2):
            assert sums.other(early=sums.rank % 2)  # as where an epoch ends
            found += [sums.add() for _ in range(2)]
        return found

    results, count = of_sums(act)
    assert results == [[SUM] * 7] * WORKERS
    assert count == 2 * 3 + 2 + 2 * (2 + 2 * 2) + 1


def test_operation_that_comes_twice_is_expected():
    def act(sums):
        for _ in range(2):
            sums.add()
            sums.add(sizes=(4,))
        sums.add()
        return sums.verifier.expects(_digest((4,)))

    results, _ = of_sums(act)
    assert results == [True] * WORKERS


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("odd", range(WORKERS))
def test_differing_worker_is_reported(odd, early):
    def act(sums):
        for _ in range(3):
            sums.add()
        if sums.rank == odd:
            noticed = not sums.other(early=early)
        else:
            noticed = sums.add(early) is None
        return noticed, sums.add(), sums.add(1)

    results, _ = of_sums(act)
    assert results == [(True, SUM, SUM)] * WORKERS


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_with_buckets_are_verified(seed):
    def act(sums):
        shared, own = random.Random(seed), random.Random(f"{seed} {sums.rank}")
        seen = []
        for _ in range(200):
            what = shared.choice(["gather", *[(2, 3)] * 4, (4,)])
            if shared.random() < 0.1:
                what = own.choice(["gather", (2, 3), (3, 2)])
            early, keeps_sent = own.randrange(2), own.random() < 0.9
            if what == "gather":
                same = sums.other(early=early)
            else:
                total = sums.add(early * (len(what) - 1), what, keeps_sent)
                same = total is not None
                assert not same or total == [6.0] * sum(what)
            seen.append((same, what))
        return seen

    results, _ = of_sums(act)
    assert_differences_noticed(results)


def workers_of(bytes_per_pack, is_local=True, own_step=False):
    """One worker, whose collectives do nothing."""
    cluster = SimpleNamespace(
        rank=0,
        size=1,
        is_local=is_local,
        options=SimpleNamespace(bytes_per_pack=bytes_per_pack),
        client=SimpleNamespace(track_operation=contextlib.nullcontext),
    )
    workers = TorchWorkers(cluster)
    workers.verifier = CollectiveVerifier(1, lambda *args, **kwargs: Done())
    step = StepState(row_weight=0.5, logs_are_metrics=not own_step)
    workers.replica = SimpleNamespace(step=step, buffers=FlatBufferPool())
    return workers


MANY, FEW = 600, 100  # 1.4 MB and 40 kB of float32 in a square


@pytest.mark.parametrize(
    ("most", "is_local", "own_step", "side", "leave"),
    [
        (0, False, False, MANY, True),  # between machines
        (0, True, False, MANY, False),  # nothing is won
        (0, False, True, MANY, False),  # a step of the user's
        (0, False, False, FEW, False),  # there is nothing to divide
        (1 << 20, True, True, MANY, True),  # it was asked for
        (10_000, True, True, FEW, True),
        (10_000, True, True, 10, False),
    ],
)
def test_buckets_overlap_backward(most, is_local, own_step, side, leave):
    workers = workers_of(most, is_local, own_step)
    gradients = [torch.ones(side, side) for _ in range(2)]
    buckets = workers.assign_buckets(gradients, gradients)
    assert buckets == ([[1], [0]] if leave else [])
    assert workers.assign_buckets(gradients, None) == []  # of no variables


def test_gradients_of_another_model_with_buckets_of_equal_sizes():
    workers = workers_of(64)
    many, few = (
        [keras.Variable(torch.full((size,), i + 1.0)) for i, size in enumerate(sizes)]
        for sizes in ((8, 8, 16, 16), (16, 16, 16))
    )
    sent = []
    for models in ([many], [many], [many], [many, few]):
        for variable in (*many, *few):
            variable.value.grad = None
        for variables in models:
            sum((v.value * v.value).sum() for v in variables).backward()
        sent.append(workers.verifier.sent)
        gradients = [v.value.grad for v in models[-1]]
        sums = workers.all_reduce_weighted(
            gradients, 0.5, workers.replica.buffers, models[-1]
        )
        for total, gradient in zip(sums, gradients, strict=True):
            assert torch.equal(total, gradient * 0.5)
    assert sent == [0, 0, 2, 2]


def test_steps_that_leave_out_other_layers_add_few_hooks():
    workers = workers_of(64)
    variables = [keras.Variable(torch.ones(20 + i)) for i in range(40)]
    for left_out in range(2, 40):
        chosen = [v for i, v in enumerate(variables) if i != left_out]
        for variable in variables:
            variable.value.grad = None
        sum(v.value.sum() for v in chosen).backward()
        workers.all_reduce_weighted(
            [v.value.grad for v in chosen], None, workers.replica.buffers, chosen
        )
    assert 0 < len(variables[0].value._post_accumulate_grad_hooks) <= 16


def test_changed_gradients_stop_early_sending():
    workers = workers_of(64)
    variables = [keras.Variable(torch.full((5, 5), i + 1.0)) for i in range(3)]
    sent = []
    for changes in (False, False, False, True, True, False, True, True, True, False):
        for variable in variables:
            variable.value.grad = None
        sum((v.value * v.value).sum() for v in variables).backward()
        sent.append(workers.verifier.sent)
        gradients = [v.value.grad for v in variables]
        if changes:
            gradients[2] *= 2.0
        sums = workers.all_reduce_weighted(
            gradients, 0.5, workers.replica.buffers, variables
        )
        for total, gradient in zip(sums, gradients, strict=True):
            assert torch.equal(total, gradient * 0.5)
    # From the third step on they are expected; after three discarded ones, no more.
    assert sent == [0, 0, 2, 2, 2, 2, 2, 2, 2, 0]


def test_buffer_is_freed_before_another_takes_memory():
    pool = FlatBufferPool(max_buffers=1)
    old = StorageWeakRef(pool.take(8, torch.zeros(1)).untyped_storage())
    freed = []

    class Like(torch.Tensor):
        def new_empty(self, size):
            freed.append(old.expired())
            return torch.empty(size)

    pool.take(9, torch.zeros(1).as_subclass(Like))
    assert freed == [True]
