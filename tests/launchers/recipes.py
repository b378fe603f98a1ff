"""Recipes of the pages on launchers, as the tests run them."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tests.pages import blocks_of

ROOT = pathlib.Path(__file__).parents[2]
PAGES = "recipes", "torchrun_mpi", "slurm", "ray"
TOLERANCE = 2e-5

_END = """
import numpy as np

if strategy.is_chief:
    np.savez("weights.npz", *model.get_weights())
    print("replicas:", strategy.num_replicas_in_sync)
"""


def read_recipe(text: str, changes: Mapping[str, str]) -> str:
    """Return the pages' block that contains a text, with the reader's changes."""
    texts = [(ROOT / "docs" / f"{page}.md").read_text() for page in PAGES]
    codes = [block.code for text in texts for block in blocks_of(text)]
    (code,) = [code for code in codes if text in code]
    for old, new in changes.items():
        assert old in code, f"{old!r} is not in the recipe"
        code = code.replace(old, new)
    return code


def write_program(
    folder: pathlib.Path, changes: Mapping[str, str] | None = None
) -> None:
    """Write the pages' train.py, which then saves its weights."""
    seed = {"with strategy": "keras.utils.set_random_seed(7)\nwith strategy"}
    code = read_recipe("# train.py", {**seed, **(changes or {})})
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code + _END)


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a user who has this package on the path."""
    return {
        **os.environ,
        "KERAS_BACKEND": keras.backend.backend(),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KERAS_STRATEGY_TIMEOUT_SECONDS": "120",
        # Open MPI starts no more processes than cores, and none as root, without these.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        **(variables or {}),
    }


def run_all(
    commands: Sequence[str],
    folders: Sequence[pathlib.Path],
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """Run shell commands at once, each in its folder, and return their outputs."""
    processes = [
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, folder in zip(commands, folders, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def read_weights(folder: pathlib.Path) -> list[np.ndarray]:
    with np.load(folder / "weights.npz") as weights:
        return list(weights.values())


def weight_difference(
    weights: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> float:
    pairs = zip(weights, expected, strict=True)
    return max(float(np.max(np.abs(got - want))) for got, want in pairs)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
