"""The picture that `keras-strategy scaling --png FILE` draws, with matplotlib."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from keras_strategy.launch.scaling import Measured, Prediction


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
