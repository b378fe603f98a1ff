"""The model's efficiency from 1 to 512 devices, beside published measurements."""

import matplotlib
import matplotlib.pyplot as plt

from benchmarks.scaling.published import ANCHORS, ETHERNET_25

matplotlib.use("svg")
DEVICES = [2**i for i in range(10)]


def draw(path: str) -> None:
    """Writes the plot as SVG.

    Args:
        path: The file.
    """
    # The same file from the same figures.
    plt.rcParams["svg.hashsalt"] = "keras_strategy"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for anchor in ANCHORS:
        low, high = (
            [anchor.step(overlap).efficiency(n, ETHERNET_25) for n in DEVICES]
            for overlap in (0, 2 / 3)
        )
        (line,) = axes.plot(DEVICES, low, label=f"{anchor.model}, no overlap")
        axes.plot(DEVICES, high, "--", color=line.get_color(), label="with overlap")
        axes.plot(
            [anchor.devices],
            [anchor.efficiency],
            "o",
            color=line.get_color(),
            label=f"measured by Horovod: {anchor.efficiency:.0%}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("GPUs (P100, 25 Gbit/s between servers of four)")
    axes.set_ylabel("efficiency (weak scaling)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
