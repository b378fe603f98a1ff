"""A model of a data-parallel training step.

Every worker computes on its own rows, and then the gradients are summed over all of
them. How long the first takes depends on the device, the second on the link.

`keras-strategy scaling train.py`: how much faster a program is on more workers.

The time of a step is the one that Keras prints at the end of each epoch of `fit`.
The program is run as it is, once for each number of workers.

The picture that `keras-strategy scaling --png FILE` draws, with matplotlib.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """What connects the workers.

    Attributes:
        latency: Seconds that a message takes whatever its size.
        bandwidth: Bytes per second that a worker sends, and receives, at once.
    """

    latency: float
    bandwidth: float

    def all_reduce(self, workers: int, data: float) -> float:
        """Seconds to sum arrays of all workers by a ring.

        In each of its 2 (N - 1) rounds a worker passes on 1/N of the data. No algorithm
        sends less: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
        for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).

        Args:
            workers: Their number N.
            data: The bytes of one worker's array.
        """
        rounds = 2 * (workers - 1)
        return rounds * (self.latency + data / workers / self.bandwidth)


@dataclass(frozen=True)
class Step:
    """A training step of one worker.

    Attributes:
        compute: Seconds of a step on one worker alone, with that worker's rows.
        gradients: The bytes of one copy of the gradients.
        overlap: The share of `compute` during which gradients already travel: 0 if they
            are summed when all are there, at most 2/3 if each is sent as soon as it is
            known, since the backward pass does two of the three parts of the
            arithmetic.
    """

    compute: float
    gradients: float
    overlap: float = 0.0

    def seconds(self, workers: int, link: Link, workers_per_device: float = 1) -> float:
        """Seconds of a step on so many workers, each with as many rows.

        Args:
            workers: Their number.
            link: What connects them.
            workers_per_device: How many workers share a device, or a core.
        """
        share = max(1.0, workers_per_device)
        compute = self.compute * share
        # Where they share a core, those that compute keep the others from sending.
        travel = link.all_reduce(workers, self.gradients) * share
        return compute + max(0.0, travel - self.overlap * compute)

    def efficiency(
        self, workers: int, link: Link, workers_per_device: float = 1
    ) -> float:
        """The speed of each device as a share of what it has alone (weak scaling)."""
        share = max(1.0, workers_per_device)
        return self.compute * share / self.seconds(workers, link, workers_per_device)


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


def png_problem(path: str) -> str:
    """Why no picture can be written there, and what helps; empty where one can.

    Args:
        path: The file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "it is drawn by matplotlib, which is not installed. Install it with "
            "pip install 'keras-strategy[plot]', or leave --png out"
        )
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return f"there is no folder {folder!r} that can be written to"
    return ""


def draw_chart(
    path: str, title: str, measured: Sequence[Measured], model: Prediction | None
) -> None:
    """Draws the efficiency, measured and predicted, over the workers.

    Args:
        path: The file, which is overwritten.
        title: What stands above it.
        measured: What was measured, the fewest workers first.
        model: What predicts it, if there is one.
    """
    # No engine of the house, and not everybody's: nothing but this draws.
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    workers = [m.workers for m in measured]
    axes.axhline(100, color="0.7", linewidth=1)
    if model is not None:
        ends = [[100 * end for end in model.efficiency(m)] for m in measured[1:]]
        low, high = zip(*ends, strict=True)
        axes.fill_between(
            workers[1:], low, high, color="tab:blue", alpha=0.25, label="predicted"
        )
    shares = [100 * m.efficiency(measured[0]) for m in measured]
    axes.plot(workers, shares, "o-", color="tab:blue", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers, [str(count) for count in workers], minor=False)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="workers", ylabel="efficiency, %")
    axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
