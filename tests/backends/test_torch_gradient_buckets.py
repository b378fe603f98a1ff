"""Sums in pieces: all workers send them, whatever they come to, or none does."""

from types import SimpleNamespace

import keras
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from keras_strategy.backends.torch.collective_check import (  # noqa: E402
    BucketedAllReduce,
    CollectiveVerifier,
)
from keras_strategy.backends.torch.collectives import TorchWorkers  # noqa: E402
from keras_strategy.backends.torch.gradient_buckets import (  # noqa: E402
    FlatBufferPool,
)
from keras_strategy.core.collectives import CHECKSUM_TAIL, call_checksum  # noqa: E402
from keras_strategy.core.step_state import StepState  # noqa: E402
from tests.backends.test_torch_collective_check import WORKERS, of_all  # noqa: E402

SIZE = 5


class Pieces(BucketedAllReduce):
    """Pieces that tell a `Sums` whether all workers would send them."""

    def __init__(self, sums):
        super().__init__(sums.sizes, "")
        self.sums = sums

    def agree(self, *args):
        super().agree(*args)
        self.sums.pieces = self

    def drop(self):
        self.sums.pieces = None
        self.sums.given_up += 1


class Sums:
    """One worker's sums of `SIZE` numbers, in pieces where all workers would.

    Args:
        verifier: What the workers expect of each other.
        rank: The worker.
        sizes: The sizes of the pieces that it would send; None for one.
    """

    def __init__(self, verifier, rank, sizes=(2, 3)):
        self.verifier, self.rank, self.sizes = verifier, rank, sizes
        self.pieces, self.given_up = None, 0

    def split(self):
        """Return the pieces of this worker."""
        return Pieces(self) if self.sizes else None

    def send(self, parts):
        """Sends so many pieces; returns whether they are due."""
        if self.verifier.pending is None:
            return False
        if not self.pieces.sent:
            self.pieces.begin(torch.empty(self.pieces.buffer_size))
        for _ in range(parts):
            size = self.sizes[self.pieces.sent]
            self.pieces.send([torch.full((size,), self.rank + 1.0)], None)
        return True

    def add(self, early=0):
        """The sum; some pieces leave before it is asked for."""
        if self.send(early) and self.send(len(self.sizes) - early):
            sums = self.verifier.finish_pending()
            if sums is not None:
                return torch.cat(sums).tolist()
        return self.in_one()

    def in_one(self, size=SIZE):
        """The sum in one piece; None if the workers are in different ones."""
        both = torch.full((size + CHECKSUM_TAIL,), float(self.rank + 1))
        digest = call_checksum("sum", (size,), "float32")
        same = self.verifier.sum_in_place(digest, both, self.split)
        return both[:-CHECKSUM_TAIL].tolist() if same else None


def of_sums(act, sizes=lambda rank: (2, 3), least=0):
    """Return each worker's result of `act(sums)`, and the collectives."""

    def with_sums(verifier, rank):
        verifier = CollectiveVerifier(WORKERS, verifier.all_reduce, least)
        return act(Sums(verifier, rank, sizes(rank)))

    return of_all(with_sums)


SUM = [6.0] * SIZE


def test_buckets_are_sent_when_all_workers_agree():
    def act(sums):
        return [sums.add(early) for early in (0, 0, 0, 0, 1, 1, 2)]

    results, count = of_sums(act)
    assert results == [[SUM] * 7] * WORKERS
    # Twice in two collectives, three times in one; after the first sum that comes
    # again they ask. Then there are two pieces.
    assert count == 2 + 2 + 1 + 1 + 4 * 2


@pytest.mark.parametrize(
    "sizes",
    [
        lambda rank: None if rank == 1 else (2, 3),
        lambda rank: (3, 2) if rank == 1 else (2, 3),
        lambda rank: None,
    ],
    ids=["one would not", "others", "nobody would"],
)
def test_disagreement_sends_one_buffer(sizes):
    def act(sums):
        return [sums.in_one() for _ in range(7)], sums.pieces

    results, count = of_sums(act, sizes)
    assert results == [([SUM] * 7, None)] * WORKERS
    assert count == 2 + 2 + 1 + 5


def test_small_gradients_use_one_bucket():
    def act(sums):
        return [sums.in_one() for _ in range(7)]

    least = (SIZE + CHECKSUM_TAIL) * 4 + 1
    assert of_sums(act, least=least) == ([[SUM] * 7] * WORKERS, 2 + 2 + 5)


@pytest.mark.parametrize("early", [0, 1])
def test_worker_discards_sent_buckets(early):
    def act(sums):
        found = [sums.add() for _ in range(5)]
        for _ in range(2):
            if sums.rank == 1:
                sums.send(early)
                found.append(sums.in_one())
            else:
                found.append(sums.add(1))
            found.append(sums.add(1))
        return found, sums.given_up

    results, _ = of_sums(act)
    assert results == [([SUM] * 9, 0)] * WORKERS


def test_buckets_stop_after_three_failures():
    def act(sums):
        given_up = []
        for in_vain in (2, 2, 3):
            for _ in range(5):
                sums.add()
            found = [sums.in_one() for _ in range(in_vain)]
            assert found == [SUM] * in_vain
            given_up.append(sums.given_up)
        return given_up, sums.pieces

    results, _ = of_sums(act)
    assert results == [([0, 0, 1], None)] * WORKERS


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("rank", range(WORKERS))
def test_differing_worker_is_reported(rank, early):
    def act(sums):
        for _ in range(5):
            sums.add()
        sums.send(early)
        other = sums.rank == rank
        if other:
            noticed = sums.in_one(4) is None
        else:
            noticed = sums.send(2 - early) and sums.verifier.finish_pending() is None
            noticed = noticed and sums.in_one() is None
        return noticed, sums.add(), sums.add(1)

    results, _ = of_sums(act)
    assert results == [(True, SUM, SUM)] * WORKERS


def test_alternating_steps_use_buckets():
    def act(sums):
        found = []
        for _ in range(6):
            found.append(sums.add() if sums.verifier.pending else sums.in_one())
            assert sums.in_one(3) == [6.0] * 3
        return found

    results, _ = of_sums(act, least=(SIZE + CHECKSUM_TAIL) * 4)
    assert results == [[SUM] * 6] * WORKERS


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
    options = SimpleNamespace(bytes_per_pack=most)
    workers = TorchWorkers(
        SimpleNamespace(rank=0, size=2, options=options, is_local=is_local)
    )
    step = StepState(logs_are_metrics=not own_step)
    workers.replica = SimpleNamespace(step=step, buffers=FlatBufferPool())
    variables = [keras.Variable(torch.ones(side, side)) for _ in range(2)]
    sum((v.value * v.value).sum() for v in variables).backward()
    gradients = [v.value.grad for v in variables]
    pieces = workers.split_gradients(gradients, variables)
    assert (pieces is not None) == leave
    assert pieces is None or list(pieces.sizes) == [side * side] * 2
    # Of gradients that backward left nowhere, nothing tells when they are there.
    others = [gradient.clone() for gradient in gradients]
    assert workers.split_gradients(others, variables) is None
    assert workers.split_gradients(gradients, None) is None
