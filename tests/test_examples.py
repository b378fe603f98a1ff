"""The examples run as their docstrings say. `make demo` runs fit_digits.py."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_custom_loop_digits():
    # It makes its own logical devices.
    environment = {k: v for k, v in os.environ.items() if "LOGICAL" not in k}
    root = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, EXAMPLES / "custom_loop_digits.py", "--epochs=3"],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on 2 devices" in result.stdout and "epoch 3" in result.stdout
