"""Speedup of a program on more workers: measured, and predicted by a model.

`keras-strategy scaling` runs the program unchanged, once for each number of workers.
The time of a step is the one that Keras prints at the end of each epoch of `fit`.

The model: each worker computes its own rows, then a ring all-reduces the gradients. The
first takes as long as the device needs, the second as long as the link needs.
"""

import argparse
import dataclasses
import re
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_strategy.commands import local_cluster
from keras_strategy.commands.processes import run_python

# "29/29 - 0s - 5ms/step - ...", or "29/29 ━━━ 0s 346us/step - ...".
_EPOCH = re.compile(r"(\d+)/\1\b.*?\b([\d.]+)(s|ms|us)/(?:step|epoch)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

NOTHING_TO_PREDICT = (
    "No prediction: it needs the times of 1 worker and of the next number, and "
    "predicts those that follow, as in --workers 1,2,4."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Median step time with a number of workers, over all epochs but the first."""

    workers: int
    step_seconds: float
    # The steps of an epoch.
    steps: int

    def efficiency(self, one: "Measured") -> float:
        """Return the rows per second and worker, relative to the fewest workers."""
        # An epoch has the same rows on any number of workers.
        alone, epoch = one.steps * one.step_seconds, self.steps * self.step_seconds
        return alone / epoch * one.workers / self.workers


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Model of a step, from measurements of one and of few workers.

    The time of the few beyond that of their rows is communication. Two measurements do
    not tell latency from bandwidth, so it is taken as all of one and all of the other.
    More workers than `cores` take turns.
    """

    alone: Measured
    few: Measured
    cores: int

    @property
    def comm_seconds(self) -> float:
        """The time of a step of the few beyond that of its rows."""
        step = self.few.step_seconds / self._turns(self.few)
        return max(0.0, step - self._compute(self.few))

    def efficiency(self, measured: Measured) -> tuple[float, float]:
        """Return the lowest and highest efficiency for its workers and steps."""
        # In each of its 2 (N - 1) rounds a worker passes on 1/N of the gradients.
        rounds = (measured.workers - 1) / (self.few.workers - 1)
        data = rounds * self.few.workers / measured.workers
        ends = []
        for growth in rounds, data:
            step = self._compute(measured) + growth * self.comm_seconds
            seconds = self._turns(measured) * step
            predicted = dataclasses.replace(measured, step_seconds=seconds)
            ends.append(predicted.efficiency(self.alone))
        return ends[0], ends[1]

    def _turns(self, measured: Measured) -> float:
        """Return how many workers share a core."""
        return max(1.0, measured.workers / self.cores)

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
    """Return the model of measurements in order of workers, if there are enough."""
    if len(measured) < 3 or measured[0].workers != 1:
        return None
    return Prediction(measured[0], measured[1], cores)


class NoEpochsError(RuntimeError):
    """A program failed, or its output does not contain the time of a step."""


def parse_step_time(output: str) -> tuple[float, int]:
    """Return the median seconds of a step in the first `fit`, and an epoch's steps."""
    # The first epoch does not count since it compiles, and another `fit` may do
    # something else.
    _, _, fits = output.partition("Epoch 1/")
    fit, _, _ = fits.partition("Epoch 1/")
    epochs = _EPOCH.findall(fit)
    if len(epochs) < 2:
        raise NoEpochsError(
            "Expected the times of two epochs or more of a `fit`: the first compiles. "
            f"Keras printed {len(_EPOCH.findall(output))}. Call fit(..., epochs=3, "
            "verbose=2) on a model of MultiWorkerMirroredStrategy."
        )
    seconds = [float(number) * _SECONDS[unit] for _, number, unit in epochs]
    return statistics.median(seconds[1:]), int(epochs[-1][0])


def measure(
    command: Sequence[str], workers: Sequence[int], devices_per_worker: int | None
) -> Iterator[Measured]:
    """Run a program with each number of workers, or raise NoEpochsError."""
    devices = []
    if devices_per_worker is not None:
        devices = ["--devices-per-worker", str(devices_per_worker)]
    for number in workers:
        run = ["-m", "keras_strategy", "run", "--workers", str(number)]
        output, status = run_python([*run, *devices, *command])
        if status:
            raise NoEpochsError(
                f"With {number} workers the program ended with {status}:\n"
                f"{output[-2000:]}"
            )
        if _EPOCH.search("\n".join(re.findall("(?m)^worker [1-9].*", output))):
            raise NoEpochsError(
                f"With {number} workers each trained alone: others than worker 0 print "
                "epochs. Create the model in the scope of MultiWorkerMirroredStrategy."
            )
        chief = re.findall("^worker 0 .*", output, re.MULTILINE)
        yield Measured(number, *parse_step_time("\n".join(chief)))


def main(options: argparse.Namespace) -> int:
    command = [options.program, *options.arguments]
    devices = options.devices_per_worker
    try:
        measured = list(measure(command, options.workers, devices))
    except NoEpochsError as error:
        Console(stderr=True, soft_wrap=True).print(escape(str(error)), style="red")
        return 1
    cores = local_cluster.available_cores()
    model = prediction(measured, cores)
    columns = "workers", "ms per step", "steps per second", "efficiency", "predicted"
    table = Table(*columns, title=escape(f"{options.program}, {cores} cores"))
    for index, row in enumerate(measured):
        predicted = ""
        if model is not None and index >= 2:
            low, high = (f"{end:.0%}" for end in model.efficiency(row))
            predicted = low if low == high else f"{low} to {high}"
        table.add_row(
            str(row.workers),
            f"{1000 * row.step_seconds:.2f}",
            f"{1 / row.step_seconds:.1f}",
            f"{row.efficiency(measured[0]):.0%}",
            predicted,
        )
    Console().print(table)
    text = str(model or NOTHING_TO_PREDICT)
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
    return 0
