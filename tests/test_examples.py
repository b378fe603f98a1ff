"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


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
