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

# "29/29 - 0s - 5ms/step - ...", or "29/29 ━━━ 0s 346us/step - ...".
_EPOCH = re.compile(r"(\d+)/\1\b.*?\b([\d.]+)(s|ms|us)/(?:step|epoch)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a number of workers gave.

    Args:
        workers: How many there were.
        step_seconds: The median of a step over the epochs but the first.
    """

    workers: int
    step_seconds: float

    def efficiency(self, one: "Measured") -> float:
        """Its steps per second, beside those of the fewest workers, for each worker."""
        faster = one.step_seconds / self.step_seconds
        return faster * one.workers / self.workers


class NoEpochsError(RuntimeError):
    """A program printed nothing that a step's time can be read of, or failed."""


def step_seconds(output: str) -> float:
    """The median of a step over the epochs of the first `fit`, but for its first one.

    The first epoch compiles, and another `fit` may be of something else.

    Args:
        output: What a program wrote.

    Raises:
        NoEpochsError: If it wrote of fewer than two epochs.
    """
    _, _, fits = output.partition("Epoch 1/")
    fit, _, _ = fits.partition("Epoch 1/")
    epochs = [float(number) * _SECONDS[unit] for _, number, unit in _EPOCH.findall(fit)]
    if len(epochs) < 2:
        raise NoEpochsError(
            "Expected the program to train two epochs or more, and Keras to print each "
            f"(fit's verbose=2). Received: {len(epochs)} such lines"
        )
    return statistics.median(epochs[1:])


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
        yield Measured(number, step_seconds("\n".join(chief)))
