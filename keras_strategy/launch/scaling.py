"""`keras-strategy scaling train.py`: how much faster a program is on more workers.

The time of a step is the one that Keras prints at the end of each epoch of `fit`.
The program is run as it is, once for each number of workers.
"""

import dataclasses
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from keras_strategy.launch.step_model import Link, Step

# "29/29 - 0s - 5ms/step - ...", or "29/29 ━━━ 0s 346us/step - ...".
_EPOCH = re.compile(r"(\d+)/\1\b.*?\b([\d.]+)(s|ms|us)/(?:step|epoch)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

NOTHING_TO_PREDICT = (
    "No prediction: it is made of the times of 1 worker and of the next number, for "
    "those that follow, as in --workers 1,2,4."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a number of workers gave.

    Args:
        workers: How many there were.
        step_seconds: The median of a step over the epochs but the first.
        steps: Those of an epoch.
    """

    workers: int
    step_seconds: float
    steps: int

    @property
    def epoch_seconds(self) -> float:
        """The time of an epoch, which has the same rows on any number of workers."""
        return self.steps * self.step_seconds

    def efficiency(self, one: "Measured") -> float:
        """Its rows per second, beside those of the fewest workers, for each worker."""
        faster = one.epoch_seconds / self.epoch_seconds
        return faster * one.workers / self.workers


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The model of `step_model`, of what one worker and a few took.

    What these few took beyond the time of their rows is what the gradients travel. How
    much of it are a ring's rounds, and how much its bytes, two measurements do not say:
    so each is taken for all of it.

    Args:
        alone: What one worker gave.
        few: What the next number of workers gave.
        cores: How many workers compute at once; more of them take turns.
    """

    alone: Measured
    few: Measured
    cores: int

    @property
    def comm_seconds(self) -> float:
        """What a step of the few took beyond the time of its rows."""
        share = max(1.0, self.few.workers / self.cores)
        return max(0.0, self.few.step_seconds / share - self._compute(self.few))

    def efficiency(self, measured: Measured) -> tuple[float, float]:
        """The lowest and the highest that the model gives.

        Args:
            measured: Of so many workers, and of so many steps in an epoch.
        """
        # A byte of gradients, of which the bandwidth makes what was measured.
        step = Step(self._compute(measured), gradients=1.0)
        several, rounds = self.few.workers, 2 * (self.few.workers - 1)
        ends = []
        for rounds_alone in True, False:
            if rounds_alone or not self.comm_seconds:
                link = Link(self.comm_seconds / rounds, float("inf"))
            else:
                link = Link(0.0, rounds / several / self.comm_seconds)
            seconds = step.seconds(
                measured.workers, link, measured.workers / self.cores
            )
            predicted = dataclasses.replace(measured, step_seconds=seconds)
            ends.append(predicted.efficiency(self.alone))
        return ends[0], ends[1]

    def _compute(self, measured: Measured) -> float:
        """How long one worker alone would take over a worker's rows of a step."""
        rows = self.alone.steps / measured.steps / measured.workers
        return rows * self.alone.step_seconds

    def __str__(self) -> str:
        return (
            "Predicted: a worker's rows take as long as with 1 worker, and a ring of N "
            "passes gradients on in 2 (N - 1) rounds. What "
            f"{self.few.workers} workers took beyond their rows, "
            f"{1000 * self.comm_seconds:.2f} ms a step, is all latency at the lower "
            "end, and all bytes at the upper.\n"
            "Assumed: each worker has a core or a GPU as fast as the one had alone, "
            f"and more than {self.cores}, the cores here, take turns; nothing "
            "overlaps; an epoch has the same rows on any number of workers. The page "
            '"How far it scales" has the formula and where it is from.'
        )


def prediction(measured: Sequence[Measured], cores: int) -> Prediction | None:
    """The model, where there is something left for it to predict.

    Args:
        measured: What was measured, the fewest workers first.
        cores: How many workers compute at once.
    """
    if len(measured) < 3 or measured[0].workers != 1:
        return None
    return Prediction(measured[0], measured[1], cores)


class NoEpochsError(RuntimeError):
    """A program printed nothing that a step's time can be read of, or failed."""


def parse_step_time(output: str) -> tuple[float, int]:
    """The median of a step over the epochs of the first `fit`, but for its first one.

    The first epoch compiles, and another `fit` may be of something else.

    Args:
        output: What a program wrote.

    Returns:
        Its seconds, and the steps of an epoch.

    Raises:
        NoEpochsError: If it wrote of fewer than two epochs.
    """
    _, _, fits = output.partition("Epoch 1/")
    fit, _, _ = fits.partition("Epoch 1/")
    epochs = _EPOCH.findall(fit)
    if len(epochs) < 2:
        raise NoEpochsError(
            "Expected the program to train two epochs or more, and Keras to print each "
            f"(fit's verbose=2). Received: {len(epochs)} such lines"
        )
    seconds = [float(number) * _SECONDS[unit] for _, number, unit in epochs]
    return statistics.median(seconds[1:]), int(epochs[-1][0])


def measure(
    command: Sequence[str], workers: Sequence[int], devices_per_worker: int | None
) -> Iterator[Measured]:
    """Runs a program with each number of workers.

    Args:
        command: The program and its arguments, as for `keras-strategy run`.
        workers: The numbers of workers.
        devices_per_worker: The logical CPU devices of each; None leaves them alone.

    Raises:
        NoEpochsError: If a run fails, or does not say how long a step takes.
    """
    devices = []
    if devices_per_worker is not None:
        devices = ["--devices-per-worker", str(devices_per_worker)]
    for number in workers:
        run = [sys.executable, "-m", "keras_strategy", "run", "--workers", str(number)]
        done = subprocess.run(
            [*run, *devices, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoEpochsError(
                f"With {number} workers the program ended with {done.returncode}:\n"
                f"{done.stderr[-2000:]}"
            )
        chief = (
            line for line in done.stdout.splitlines() if line.startswith("worker 0 ")
        )
        yield Measured(number, *parse_step_time("\n".join(chief)))
