"""What is compared with what: a comparison makes two programs of a case."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import keras

import keras_strategy as ks
from benchmarks.cases import Case
from benchmarks.pairing import Train
from benchmarks.plain import plain_keras


@dataclass(frozen=True)
class Comparison:
    """Ours and a peer.

    Attributes:
        name: What of ours it is, such as "fit".
        peer: The peer's name.
        replicas: The replicas of ours.
        aim: What the ratio shall be at least; None where the peer is shown alone.
        programs: Makes both programs for a case, ours first.
        workers: The processes that both of them run in.
        without: The names of cases that are left out.
    """

    name: str
    peer: str
    replicas: int
    aim: float | None
    programs: Callable[[Case], tuple[Train, Train]]
    workers: int = 1
    without: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The devices of each process."""
        return self.replicas // self.workers


def fit(model: keras.Model, case: Case) -> Train:
    """`model.fit` of one epoch of so many steps."""

    def train(steps: int) -> None:
        x, y = case.rows(steps * case.batch)
        model.fit(x, y, batch_size=case.batch, verbose=0)

    return train


def fit_in_scope(
    strategy: ks.Strategy, case: Case, steps_per_execution: int = 1
) -> Train:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return fit(case.compiled(steps_per_execution), case)


def plain_fit(case: Case) -> Train:
    """`model.fit` of a Keras that nothing was installed in."""
    keras.utils.set_random_seed(0)
    with plain_keras():
        train = fit(case.compiled(), case)

    def plain(steps: int) -> None:
        with plain_keras():
            train(steps)

    return plain


def _device() -> str:
    return ks.MirroredStrategy().extended.worker_devices[0]


ONE_DEVICE = (
    Comparison(
        "fit, OneDeviceStrategy",
        "plain Keras",
        1,
        0.98,
        lambda case: (
            fit_in_scope(ks.OneDeviceStrategy(_device()), case),
            plain_fit(case),
        ),
        # The same program as below: two cases show it.
        without=("MLP, batch 1024", "CNN", "embedding"),
    ),
    Comparison(
        "fit, MirroredStrategy",
        "plain Keras",
        1,
        0.98,
        lambda case: (
            fit_in_scope(ks.MirroredStrategy([_device()]), case),
            plain_fit(case),
        ),
    ),
)


def of_backend() -> tuple[Comparison, ...]:
    """The comparisons of the backend in use."""
    name = keras.backend.backend()
    peers = importlib.import_module(f"benchmarks.{name}_peers")
    return (*ONE_DEVICE, *peers.COMPARISONS)
