"""Speedup of a program on more workers: measured, and predicted by a model.

`keras-strategy scaling` runs the program unchanged, once for each number of workers.
The time of a step is the one that Keras prints at the end of each epoch of `fit`.

The model: each worker computes its own rows, then a ring all-reduces the gradients. The
first takes as long as the device needs, the second as long as the link needs.
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
from typing import Any

# "29/29 - 0s - 5ms/step - ...", or "29/29 ━━━ 0s 346us/step - ...".
_EPOCH = re.compile(r"(\d+)/\1\b.*?\b([\d.]+)(s|ms|us)/(?:step|epoch)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

NOTHING_TO_PREDICT = (
    "No prediction: it needs the times of 1 worker and of the next number, and "
    "predicts those that follow, as in --workers 1,2,4."
)


@dataclasses.dataclass(frozen=True)
class Link:
    """Connection between workers.

    Attributes:
        latency: Seconds of a message of any size.
        bandwidth: Bytes per second that a worker sends, and receives at the same time.
    """

    latency: float
    bandwidth: float

    def all_reduce(self, workers: int, data: float) -> float:
        """Return the seconds of a ring all-reduce.

        In each of its 2 (N - 1) rounds a worker passes on 1/N of the data. No algorithm
        sends less: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
        for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).

        Args:
            workers: Their number N.
            data: The bytes of one worker's array.
        """
        rounds = 2 * (workers - 1)
        return rounds * (self.latency + data / workers / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Step:
    """Data-parallel training step.

    Attributes:
        compute: Seconds of a step on one worker alone, with that worker's rows.
        gradients: The bytes of one copy of the gradients.
        overlap: The share of `compute` that overlaps with the all-reduce: 0 if that
            starts when all gradients are there; at most 2/3 if each gradient is sent at
            once, since the backward pass does two thirds of the arithmetic.
    """

    compute: float
    gradients: float
    overlap: float = 0.0

    def seconds(self, workers: int, link: Link, workers_per_device: float = 1) -> float:
        """Return the seconds of a step, with the same rows for each worker.

        Args:
            workers: Their number.
            link: The connection between them.
            workers_per_device: How many workers share a device, or a core.
        """
        share = max(1.0, workers_per_device)
        compute = self.compute * share
        # On a shared core, workers that compute keep the others from sending.
        comm = link.all_reduce(workers, self.gradients) * share
        return compute + max(0.0, comm - self.overlap * compute)

    def efficiency(
        self, workers: int, link: Link, workers_per_device: float = 1
    ) -> float:
        """Return the speed of each device relative to one alone (weak scaling)."""
        share = max(1.0, workers_per_device)
        return self.compute * share / self.seconds(workers, link, workers_per_device)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurement with a number of workers.

    Attributes:
        workers: The number of workers.
        step_seconds: The median time of a step over all epochs but the first.
        steps: The steps of an epoch.
    """

    workers: int
    step_seconds: float
    steps: int

    @property
    def epoch_seconds(self) -> float:
        """The time of an epoch, which has the same rows on any number of workers."""
        return self.steps * self.step_seconds

    def efficiency(self, one: "Measured") -> float:
        """Return the rows per second and worker, relative to the fewest workers."""
        speedup = one.epoch_seconds / self.epoch_seconds
        return speedup * one.workers / self.workers


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Model of a step, from measurements of one and of few workers.

    The time of the few beyond that of their rows is communication. Two measurements do
    not tell latency from bandwidth, so it is taken as all of one and all of the other.

    Attributes:
        alone: The measurement of one worker.
        few: The measurement of the next number of workers.
        cores: How many workers compute in parallel; more take turns.
    """

    alone: Measured
    few: Measured
    cores: int

    @property
    def comm_seconds(self) -> float:
        """The time of a step of the few beyond that of its rows."""
        share = max(1.0, self.few.workers / self.cores)
        return max(0.0, self.few.step_seconds / share - self._compute(self.few))

    def efficiency(self, measured: Measured) -> tuple[float, float]:
        """Return the lowest and the highest efficiency that the model predicts.

        Only the numbers of workers and steps of `measured` count.
        """
        # One byte of gradients: the bandwidth makes it take the measured time.
        step = Step(self._compute(measured), gradients=1.0)
        few, rounds = self.few.workers, 2 * (self.few.workers - 1)
        ends = []
        for latency_only in True, False:
            if latency_only or not self.comm_seconds:
                link = Link(self.comm_seconds / rounds, float("inf"))
            else:
                link = Link(0.0, rounds / few / self.comm_seconds)
            seconds = step.seconds(
                measured.workers, link, measured.workers / self.cores
            )
            predicted = dataclasses.replace(measured, step_seconds=seconds)
            ends.append(predicted.efficiency(self.alone))
        return ends[0], ends[1]

    def _compute(self, measured: Measured) -> float:
        """Return the time that one worker alone needs for a worker's rows of a step."""
        rows = self.alone.steps / measured.steps / measured.workers
        return rows * self.alone.step_seconds

    def __str__(self) -> str:
        return (
            "Predicted: a worker's rows take as long as with 1 worker, and a ring of N "
            "passes gradients on in 2 (N - 1) rounds. The time of "
            f"{self.few.workers} workers beyond that of their rows, "
            f"{1000 * self.comm_seconds:.2f} ms a step, is all latency at the lower "
            "end, and all bytes at the upper.\n"
            "Assumed: each worker has a core or a GPU as fast as the one had alone, "
            f"and more than {self.cores}, the cores here, take turns; nothing "
            "overlaps; an epoch has the same rows on any number of workers. The page "
            '"How far it scales" has the formula and its source.'
        )


def prediction(measured: Sequence[Measured], cores: int) -> Prediction | None:
    """Return the model of measurements in order of workers, None if there are too few.

    Args:
        measured: The measurements.
        cores: How many workers compute in parallel.
    """
    if len(measured) < 3 or measured[0].workers != 1:
        return None
    return Prediction(measured[0], measured[1], cores)


class NoEpochsError(RuntimeError):
    """A program failed, or its output does not contain the time of a step."""


def parse_step_time(output: str) -> tuple[float, int]:
    """Return the median seconds of a step in the first `fit`, and an epoch's steps.

    The first epoch does not count since it compiles, and another `fit` may do something
    else.

    Raises:
        NoEpochsError: If the output has fewer than two epochs.
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
    """Run a program with each number of workers.

    Args:
        command: The program and its arguments, as for `keras-strategy run`.
        workers: The numbers of workers.
        devices_per_worker: The logical CPU devices of each; None keeps the backend's
            own.

    Raises:
        NoEpochsError: If a run fails, or does not print the time of a step.
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
    """Return why no chart can be written to a file and how to fix it, "" if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "it needs matplotlib, which is not installed. Install it with "
            "pip install 'keras-strategy[plot]', or leave --png out"
        )
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return f"there is no folder {folder!r} that can be written to"
    return ""


def draw_chart(
    path: str, title: str, measured: Sequence[Measured], model: Prediction | None
) -> None:
    """Draw the efficiency over the number of workers into a PNG file."""
    # matplotlib is optional, so import it lazily.
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
    efficiencies = [100 * m.efficiency(measured[0]) for m in measured]
    axes.plot(workers, efficiencies, "o-", color="tab:blue", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers, [str(count) for count in workers], minor=False)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="workers", ylabel="efficiency, %")
    axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
