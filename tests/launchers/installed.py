"""Launchers of this machine, and the reasons why others are not installed."""

import json
import os
import pathlib
import shutil

BUILD = pathlib.Path(__file__).parents[2] / "build" / "launchers"
RAY_PYTHON = BUILD / "ray" / "bin" / "python"
# The command of each launcher that tools/install_launchers.py installs.
COMMANDS = {
    "Open MPI": "mpirun.openmpi",
    "MPICH": "mpiexec.hydra",
    "Slurm": "slurmctld",
    "Ray": str(RAY_PYTHON),
}
REASONS = BUILD / "not_installed.json"


def is_installed(launcher: str) -> bool:
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    return shutil.which(COMMANDS[launcher], path=path) is not None


def missing_reasons() -> dict[str, str]:
    """Return why launchers could not be installed, by their names."""
    return json.loads(REASONS.read_text()) if REASONS.exists() else {}
