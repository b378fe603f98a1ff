"""Writes the drawings of the documentation, docs/images/*.svg: `make pictures`.

Words stand on boxes of a colour of their own, and lines are of a middle grey, so that a
drawing is read on a light page and on a dark one.
"""

import functools
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.scaling.model import ANCHORS

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
IMAGES = BENCHMARKS.parent / "docs" / "images"

PROGRAM, DATA, DEVICE, RESULT = "#283593", "#00695c", "#4527a0", "#9e3d00"
GREY = "#808a95"
# Dark enough for white words.
GREY_BOX = "#57606a"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'Roboto Mono', 'DejaVu Sans Mono', monospace"


class Drawing:
    """Boxes and arrows, in the order in which they are drawn.

    Args:
        width: In units of the drawing.
        height: The same.
        says: What who does not see it is told.
    """

    def __init__(self, width: int, height: int, says: str):
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{escape(says)}" font-family="{FONT}" '
            'font-size="15">',
            f"<title>{escape(says)}</title>",
            '<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/>'
            "</marker>",
        ]

    def box(self, x, y, width, height, colour, *lines: str, mono=False, left=False):
        """Draws a box with its words, in lines."""
        self._lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'fill="{colour}"/>'
        )
        top = y + height / 2 - 10 * (len(lines) - 1) + 5
        at, anchor = (x + 14, "start") if left else (x + width / 2, "middle")
        family = f' font-family="{MONO}" font-size="14"' if mono else ""
        for number, line in enumerate(lines):
            # Spaces in front of a line of code stay.
            text = escape(line.replace("  ", "\u00a0\u00a0"))
            self._lines.append(
                f'<text x="{at:g}" y="{top + 20 * number:g}" fill="#fff" '
                f'text-anchor="{anchor}"{family}>{text}</text>'
            )

    def arrow(self, x1, y1, x2, y2):
        """Draws an arrow."""
        self._lines.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" '
            'stroke-width="1.6" marker-end="url(#end)"/>'
        )

    def point(self, x, y, colour):
        """Draws a dot."""
        self._lines.append(f'<circle cx="{x:g}" cy="{y:.1f}" r="6" fill="{colour}"/>')

    def line(self, points, colour, dash="", width=2.4):
        """Draws a line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._lines.append(
            f'<polyline points="{through}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:g}" stroke-dasharray="{dash}"/>'
        )

    def picture(self, x, y, width, height, png):
        """Draw pixels without interpolation."""
        self._lines.append(
            f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:.1f}" '
            'image-rendering="pixelated" preserveAspectRatio="none" '
            f'href="data:image/png;base64,{png}"/>'
        )

    def printed(self, x, y, text):
        """Draw the output of a program on a box."""
        text = escape(text.replace(" ", "\u00a0"))
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" fill="#fff" font-family="{MONO}" '
            f'font-size="13">{text}</text>'
        )

    def words(self, x, y, text, anchor="middle"):
        """Write text beside the boxes."""
        self._lines.append(
            f'<text x="{x:g}" y="{y:g}" fill="{GREY}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def text(self) -> str:
        """Return the drawing."""
        return "\n".join([*self._lines, "</svg>"]) + "\n"


def idea() -> str:
    """One program, N devices, three backends."""
    drawing = Drawing(
        760,
        470,
        "One program; the samples of its global batch are split over four devices; "
        "their gradients are summed; the weights match one device; JAX, torch or "
        "TensorFlow compute",
    )
    drawing.box(
        *(130, 4, 500, 98, PROGRAM),
        "with strategy.scope():",
        "    model = keras.Sequential([...])",
        "    model.compile(...)",
        "model.fit(x, y, batch_size=64)",
        mono=True,
        left=True,
    )
    drawing.arrow(380, 102, 380, 130)
    drawing.box(130, 132, 500, 34, DATA, "global batch: 64 samples")
    for number in range(4):
        x = 40 + 175 * number
        drawing.arrow(205 + 117 * number, 166, x + 77, 204)
        samples = f"samples {16 * number} to {16 * number + 15}"
        drawing.box(x, 206, 155, 54, DEVICE, f"device {number}", samples)
        drawing.arrow(x + 77, 260, 205 + 117 * number, 298)
    drawing.box(
        130, 300, 500, 34, RESULT, "gradients, weighted by samples, are summed once"
    )
    drawing.arrow(380, 334, 380, 362)
    result = "weights, logs and predictions match one device"
    drawing.box(130, 364, 500, 34, PROGRAM, result)
    for number, engine in enumerate(
        ("JAX: XLA sharding", "torch: torch.distributed", "TensorFlow: tf.distribute")
    ):
        drawing.box(40 + 230 * number, 424, 220, 34, GREY_BOX, engine)
    return drawing.text()


LAYERS = (
    ("testing   commands", "worker processes for your tests; the command line"),
    ("experimental   tpu", "further names of tf.distribute and of tf.tpu"),
    ("callbacks   coordinator", "callbacks for fit; functions on workers"),
    ("config", "settings of the process"),
    ("strategies", "the public strategies: a choice of devices each"),
    ("backends", "JAX, torch, TensorFlow: one file name per concept"),
    ("keras_patches", "checked replacements of Keras functions"),
    ("data", "from your data to each replica's rows"),
    ("training", "row weights, losses, aggregation: no backend, no patch"),
    ("core", "protocols of engine, group and replica; scopes"),
    ("cluster", "processes of one job: rendezvous, failure, exit"),
    ("cluster_resolver", "which worker this is, and where the others are"),
    ("options   values   errors", "plain data"),
)


def layers() -> str:
    """Draw the layers of the package: each imports only those below it."""
    drawing = Drawing(
        760,
        10 + 44 * len(LAYERS),
        "The layers of keras_strategy, from the top: "
        + ", ".join(name.replace("   ", ", ") for name, _ in LAYERS),
    )
    for number, (name, purpose) in enumerate(LAYERS):
        y = 6 + 44 * number
        colour = (PROGRAM, DEVICE)[number % 2]
        drawing.box(4, y, 230, 38, colour, name, mono=True)
        drawing.words(248, y + 24, purpose, anchor="start")
    return drawing.text()


CALLS = (
    (
        "JAX",
        ("one program over a mesh,", "keras.distribution"),
        ("shard_map, compiled",),
    ),
    ("torch", ("fit's loop over run;", "replicas in turns, or processes"), ("Python",)),
    (
        "TensorFlow",
        ("fit's loop over run,", "in one tf.function"),
        ("tf.distribute's run,", "in a tf.function"),
    ),
)


def calls() -> str:
    """Draw the path of `fit` and of `run` on each backend."""
    drawing = Drawing(
        760,
        348,
        "model.fit reaches the backend's adapter through a patch, strategy.run through "
        "the strategy",
    )
    drawing.box(60, 8, 280, 38, PROGRAM, "model.fit(x, y)", mono=True)
    drawing.box(420, 8, 280, 38, PROGRAM, "strategy.run(step, args)", mono=True)
    drawing.arrow(200, 46, 200, 74)
    drawing.arrow(560, 46, 560, 74)
    drawing.box(
        60,
        76,
        280,
        56,
        DATA,
        "the patch finds the model's",
        "strategy; data is split by rows",
    )
    drawing.box(
        420,
        76,
        280,
        56,
        DATA,
        "the strategy checks and unwraps",
        "each replica's arguments",
    )
    drawing.words(236, 160, "fit", anchor="middle")
    drawing.words(526, 160, "run", anchor="middle")
    for number, (name, of_fit, of_run) in enumerate(CALLS):
        y = 172 + 58 * number
        drawing.box(290, y, 180, 50, RESULT, name)
        drawing.box(20, y, 256, 50, DEVICE, *of_fit)
        drawing.box(484, y, 256, 50, DEVICE, *of_run)
    drawing.arrow(200, 132, 200, 168)
    drawing.arrow(560, 132, 560, 168)
    return drawing.text()


LINES = {"jax": "#1565c0", "torch": "#c62828", "tensorflow": "#bf6000"}
DASHES = "", "7 5", "2 4"
# What a line of the monospaced font holds beside the name of a backend.
LETTERS = 76


# In this order, where an example saves several.
SHOWN = "clean", "noisy", "denoised", "made", "real"


def _made(name: str) -> int:
    return SHOWN.index(name) if name in SHOWN else len(SHOWN)


# What trainings are called that nothing is printed before.
TRAININGS = {
    "fit_digits": ("two devices", "one device"),
    "own_rows": ("two workers",),
    "multi_worker": ("two workers", "one device"),
    "lora_transformer": ("two workers",),
    "sharded_optimizer": ("two devices", "two that share state", "one device"),
}


def card(path: pathlib.Path) -> str:
    """Return the output of an example, as tools/gallery.py recorded it."""
    recorded = json.loads(path.read_text())
    key, runs = recorded["key"], recorded["runs"]
    pictures = []
    for name in sorted(next(iter(runs.values()))["images"], key=_made):
        made = {backend: run["images"][name] for backend, run in runs.items()}
        if all(one == next(iter(made.values())) for one in made.values()):
            pictures.append((name, next(iter(made.values()))))
        else:
            pictures += [(f"{name}, {backend}", one) for backend, one in made.items()]
    said = [
        (backend, part)
        for backend, run in runs.items()
        for line in run["said"]
        for part in textwrap.wrap(line, LETTERS)
    ]
    # One below the other, or three beside each other.
    strips = any(made["width"] > 3 * made["height"] for _, made in pictures)
    across, width = (1, 640) if strips else (3, 226)
    rows = math.ceil(len(pictures) / across)
    each = 26 + max(
        (width * made["height"] / made["width"] for _, made in pictures), default=0
    )
    top = 262
    high = round(top + each * rows + 20 * len(said) + 56)
    drawing = Drawing(
        760,
        high,
        f"{key} of examples/{path.stem}.py, epoch by epoch, on {', '.join(runs)}, "
        "and what it printed in the end",
    )
    first = next(iter(runs.values()))
    printed = [training["after"] for training in first["trainings"]]
    _curves(drawing, key, runs, TRAININGS.get(path.stem, printed))
    for number, (name, made) in enumerate(pictures):
        x = (60 if strips else 20) + 246 * (number % across)
        y = top + each * (number // across)
        height = width * made["height"] / made["width"]
        drawing.picture(x, y, width, height, made["png"])
        drawing.words(x + width / 2, y + height + 18, name)
    y = round(top + each * rows + 6)
    drawing.box(4, y, 752, 20 * len(said) + 14, GREY_BOX)
    for number, (backend, line) in enumerate(said):
        first = number == 0 or said[number - 1][0] != backend
        drawing.printed(
            14, y + 22 + 20 * number, f"{backend if first else '':11}{line}"
        )
    versions = ", ".join(f"{p} {v}" for p, v in recorded["versions"].items())
    drawing.words(
        380, high - 10, f"{recorded['date']}, {recorded['machine']}; {versions}"
    )
    return drawing.text()


def _curves(drawing: Drawing, key: str, runs: dict, names: Sequence[str]) -> None:
    """Draw a number per epoch, a colour per backend and a dash per training."""
    drawn = [
        (backend, number, training["first"], values)
        for backend, run in runs.items()
        for number, training in enumerate(
            t for t in run["trainings"] if key in t["epochs"][-1]
        )
        for values in [[epoch.get(key) for epoch in training["epochs"]]]
    ]
    values = [v for *_, values in drawn for v in values if v is not None]
    low, high = min(values), max(values)
    epochs = max(first + len(values) - 1 for *_, first, values in drawn)
    for value, y in ((high, 50), (low, 210)):
        drawing.words(56, y + 5, f"{value:.3g}", anchor="end")
    for backend, number, first, values in drawn:
        points = [
            (
                66 + 670 * (first + i - 1) / max(1, epochs - 1),
                210 - 160 * (value - low) / ((high - low) or 1),
            )
            for i, value in enumerate(values)
            if value is not None
        ]
        drawing.line(points, LINES[backend], DASHES[number % len(DASHES)])
    for number, backend in enumerate(runs):
        drawing.box(66 + 120 * number, 6, 112, 26, LINES[backend], backend)
    drawing.words(736, 24, f"{key}, epochs 1 to {epochs}", anchor="end")
    if len(names) > 1:
        lines = ("solid", "dashed", "dotted")
        told = (f"{line}: {name}" for line, name in zip(lines, names, strict=False))
        for number, line in enumerate(textwrap.wrap("; ".join(told), 96)):
            drawing.words(380, 236 + 18 * number, line)


def scaling() -> str:
    """Draw the model's efficiency from 1 to 512 GPUs beside published measurements."""
    drawing = Drawing(
        760,
        400,
        "Efficiency from 1 to 512 GPUs by the model, for Inception V3 and VGG-16, "
        "without overlap and with it, and what Horovod measured on 512",
    )
    devices = [2**i for i in range(10)]
    what = "GPUs (P100, 25 Gbit/s between servers of four)"
    at = _efficiency_axes(drawing, devices, what)
    for number, anchor in enumerate(ANCHORS):
        colour = list(LINES.values())[number]
        for place, dash in enumerate(("", DASHES[1])):  # without overlap, and with it
            points = [at(n, anchor.predict(n)[place]) for n in devices]
            drawing.line(points, colour, dash)
        drawing.point(*at(anchor.devices, anchor.efficiency), colour)
        drawing.box(80 + 110 * number, 6, 104, 26, colour, anchor.model)
    told = "solid: no overlap; dashed: overlap; dots: measured"
    drawing.words(740, 24, told, anchor="end")
    return drawing.text()


def links() -> str:
    """Draw the measured efficiency of 1 to 8 workers on links of a known rate."""
    drawing = Drawing(
        760,
        400,
        "Efficiency of 1, 2, 4 and 8 workers on links of 10 Gbit/s, 1 Gbit/s and "
        "100 Mbit/s: fit, DistributedDataParallel by hand, and the prediction",
    )
    at = _efficiency_axes(drawing, [1, 2, 4, 8], "workers, each with its own rows")
    rows = json.loads((BENCHMARKS / "network" / "links.json").read_text())
    measured = itertools.groupby(rows, lambda row: row["link"])
    for number, (link, found) in enumerate(measured):
        steps, colour = list(found), list(LINES.values())[number]
        for key, dash in ("ours", DASHES[0]), ("DDP", DASHES[1]):
            points = [at(s["workers"], steps[0][key] / s[key]) for s in steps]
            drawing.line(points, colour, dash)
        for step in steps[1:]:
            efficiency = steps[0]["predicted"] / step["predicted"]
            drawing.point(*at(step["workers"], efficiency), colour)
        drawing.box(80 + 110 * number, 6, 104, 26, colour, link)
    drawing.words(740, 24, "solid: fit; dashed: DDP; dots: predicted", anchor="end")
    return drawing.text()


def _efficiency_axes(drawing: Drawing, numbers: Sequence[int], what: str) -> Any:
    """Draw the axes; return the function that gives the place of an efficiency."""
    last = math.log2(numbers[-1])

    def at(number, efficiency):
        return 80 + 640 * math.log2(number) / last, 340 - 270 * efficiency

    for percent in range(0, 101, 20):
        (left, y), (right, _) = (at(n, percent / 100) for n in (1, numbers[-1]))
        drawing.line([(left, y), (right, y)], GREY, width=0.4)
        drawing.words(left - 10, y + 5, f"{percent} %", anchor="end")
    for number in numbers:
        drawing.words(at(number, 0)[0], 362, str(number))
    drawing.words(400, 388, what)
    return at


DRAWINGS = {
    "idea": idea,
    "layers": layers,
    "calls": calls,
    "scaling": scaling,
    "links": links,
}
for _path in sorted(IMAGES.glob("gallery/*.json")):
    DRAWINGS[f"gallery/{_path.stem}"] = functools.partial(card, _path)


def main():
    """Write all pictures."""
    IMAGES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
