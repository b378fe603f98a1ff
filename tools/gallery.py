"""Runs the examples, and writes down what they print and make: `make gallery`.

    python tools/gallery.py [--backends jax torch tensorflow] [--verbose] [NAME ...]

What was recorded is in docs/images/gallery/*.json, and `make pictures` draws it. It
takes minutes.
"""

import argparse
import base64
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import struct
import sys
import tempfile
import zlib

import numpy as np

from keras_strategy.testing import WorkerRunner
from tests.testing.warm_starter import WarmStarter

ROOT = pathlib.Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "images" / "gallery"
# Of each example: its workers, which number of an epoch is drawn, and whether it saves
# what it has made. Of a notebook, the latter is what to save.
EXAMPLES = {
    "fit_digits": (1, "loss", False),
    "custom_loop": (1, "test accuracy", False),
    "mnist_cnn": (1, "val_accuracy", True),
    "gan_digits": (1, "distance", "made=made, real=real"),
    "multi_worker": (2, "accuracy", False),
    "text_transformer": (1, "loss", False),
    "denoising_autoencoder": (1, "loss", True),
    "vae_digits": (1, "loss", "plane=plane"),
    "transfer_learning": (1, "val_accuracy", False),
    "distillation": (1, "accuracy", False),
    "early_stopping": (1, "val_loss", False),
    "own_rows": (2, "loss", False),
    "sharded_optimizer": (1, "loss", False),
    "lora_transformer": (2, "loss", False),
    "tf_distribute_port": (1, "accuracy", False),
}
BACKENDS = "jax", "torch", "tensorflow"
PACKAGES = "keras", "jax", "torch", "tensorflow-cpu"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m|\x08")
# What engines and libraries print by themselves.
_OF_OTHERS = re.compile(r"\[Gloo\]|[IWE]\d{4} |WARNING:|/")
# What an example says first.
_WHERE = re.compile(rf"({'|'.join(BACKENDS)}) on \d+ devices$")
_EPOCH = re.compile(r"Epoch (\d+)/\d+|epoch (\d+): (.*)")
_OF_FIT = re.compile(r" - (\w+): ([-+.e\d]+)")
_OF_LOOP = re.compile(r"([a-z][a-z ]*) ([-+.e\d]+)")


def curves(output: str) -> list[dict]:
    """Return the printed lines of each epoch, by training.

    Args:
        output: What an example has printed, with `fit`'s lines or its own.

    Returns:
        For each training the line that was printed before it, its first epoch, and its
        numbers by name, epoch by epoch.
    """
    trainings: list[dict] = []
    said, begins = "", True
    for line in re.split(r"[\r\n]+", _COLOURS.sub("", output)):
        epoch = _EPOCH.match(line)
        if epoch:
            number = int(epoch[1] or epoch[2])
            if begins and not (trainings and number == _next_epoch(trainings[-1])):
                trainings.append({"after": said, "first": number, "epochs": []})
            begins = False
            numbers = _OF_LOOP.findall(epoch[3] or "")
            trainings[-1]["epochs"].append(
                {name.strip(): float(number) for name, number in numbers}
            )
        elif numbers := _OF_FIT.findall(line):
            # The last of a progress bar counts.
            if trainings:
                of_epoch = trainings[-1]["epochs"][-1]
                of_epoch.update({name: float(number) for name, number in numbers})
        elif line.strip() and not re.match(rf" *\S*\d+/\d+|{_OF_OTHERS.pattern}", line):
            said, begins = line.strip(), True
    return trainings


def _next_epoch(training: dict) -> int:
    """Return the training that continues; text between two trainings is a warning."""
    return training["first"] + len(training["epochs"])


def words(output: str) -> list[str]:
    """Return the lines that the example prints, without those of `fit`."""
    lines = _COLOURS.sub("", output).replace("\r", "\n").splitlines()
    return [
        line
        for line in map(str.strip, lines)
        if line
        and not _EPOCH.match(line)
        and not re.match(rf"\d+/\d+|{_OF_OTHERS.pattern}", line)
        and not _WHERE.match(line)
    ]


def png(pixels: np.ndarray) -> str:
    """Return an SVG image of values from 0 to 1, in grey or in colours."""
    data = (np.clip(pixels, 0, 1) * 255).round().astype("uint8")
    high, wide = data.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in data)

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
        )

    head = struct.pack(">IIBBBBB", wide, high, 8, 2 if data.ndim == 3 else 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    file += chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return base64.b64encode(file).decode()


def tiled(images: np.ndarray) -> dict:
    """Images side by side: in whole rows, near to a square, where there are more."""
    count = len(images)
    square = range(round(count**0.5), count + 1)
    across = count if count <= 12 else next(n for n in square if count % n == 0)
    rows = [np.concatenate(images[i : i + across], 1) for i in range(0, count, across)]
    whole = np.concatenate(rows)
    return {"width": whole.shape[1], "height": whole.shape[0], "png": png(whole)}


def recorded(name: str, starter: WarmStarter, verbose: bool) -> dict:
    """Run an example."""
    workers, _, saves = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "made.npz")
        program = ROOT / "examples" / f"{name}.py"
        arguments = ["--save", str(file)] if saves is True else []
        if isinstance(saves, str):
            source = f"{program.read_text()}\nnp.savez({str(file)!r}, {saves})\n"
            program = pathlib.Path(folder, program.name)
            program.write_text(source)
        # It asks for its devices by itself.
        alone = {"KERAS_STRATEGY_LOGICAL_CPUS": None}
        with WorkerRunner(
            workers, timeout_seconds=280, environment=alone, starter=starter
        ) as runner:
            runner.start(program, *arguments)
            ends = runner.wait()
        for end in ends:
            if verbose or end.exit_status:
                print(end.output, file=sys.stderr)
            if end.exit_status:
                raise RuntimeError(f"ended with {end.exit_status}")
        made = dict(np.load(file)) if saves else {}
    trainings = curves(ends[0].output)
    titles = {training["after"] for training in trainings}
    said = [
        line
        for end in ends
        for line in [x for x in words(end.output) if x not in titles][-3 // workers :]
    ]
    return {
        "trainings": trainings,
        "said": said,
        "images": {key: tiled(value) for key, value in made.items()},
    }


def note(name: str, backend: str, run: dict) -> None:
    """Write a run to the file of its example."""
    path = RECORDED / f"{name}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    content = {
        "key": EXAMPLES[name][1],
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {p: importlib.metadata.version(p) for p in PACKAGES},
        "runs": runs | {backend: run},
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--verbose", action="store_true", help="shows their output")
    options = parser.parse_args()
    os.environ.setdefault("NPROC", "8")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    RECORDED.mkdir(exist_ok=True, parents=True)
    failed = False
    for backend in options.backends:
        os.environ["KERAS_BACKEND"] = backend
        with WarmStarter(["keras", "sklearn.datasets"]) as starter:
            for name in options.names or EXAMPLES:
                try:
                    run = recorded(name, starter, options.verbose)
                except RuntimeError as error:
                    print(f"{name} on {backend}: {error}", flush=True)
                    failed = True
                    continue
                print(f"{name} on {backend}: {run['said'][-1:]}", flush=True)
                note(name, backend, run)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
