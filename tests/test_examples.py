"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import pathlib

import pytest

from tests.pages import blocks_of

ROOT = pathlib.Path(__file__).parents[1]
ALONE = [
    pytest.param(block.code, id=f"{path.stem}-{block.line}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in blocks_of(path.read_text())
    if block.alone
]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_loop.py", "the best weights again"), ("gan_digits.py", "fell to")],
)
def test_example(name, last, program):
    # It makes its own logical devices.
    end = program(EXAMPLES / name, "--epochs=3")
    assert end.exit_status == 0, end.output
    assert "on 2 devices" in end.output and "epoch 3" in end.output
    assert last in end.output


@pytest.mark.parametrize("code", ALONE)
def test_a_block_that_is_a_program(code, program):
    end = program(code)
    assert end.exit_status == 0, end.output
