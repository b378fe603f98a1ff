"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "last"),
    [("custom_loop.py", "the best weights again"), ("gan_digits.py", "fell to")],
)
def test_example(name, last):
    # It makes its own logical devices.
    environment = {k: v for k, v in os.environ.items() if "LOGICAL" not in k}
    root = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, "--epochs=3"],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on 2 devices" in result.stdout and "epoch 3" in result.stdout
    assert last in result.stdout
