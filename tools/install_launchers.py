"""Install the launchers that `make test-launchers` starts programs with.

    python -m tools.install_launchers

Open MPI, MPICH and Slurm are Debian's packages. Ray has an environment of its own,
build/launchers/ray, which also finds the packages of this Python. The tests skip a
launcher that could not be installed, with the reason.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

from tests.launchers.installed import RAY_PYTHON, REASONS, is_installed

PACKAGES = {
    "Open MPI": ["openmpi-bin"],
    "MPICH": ["mpich"],
    "Slurm": ["slurm-wlm", "munge"],
}
RAY = "ray[train]==2.60.0"
CONSTRAINTS = pathlib.Path(__file__).parents[1] / "constraints.txt"
_MINUTES = 10


def install_packages(names: list[str]) -> None:
    """Install Debian packages; raise OSError or SubprocessError otherwise."""
    root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    apt = [*root, "apt-get", "--yes", "--no-install-recommends"]
    call([*apt, "update"])
    call([*apt, "install", *names])


def install_ray() -> None:
    """Install Ray beside the packages of this Python."""
    folder = RAY_PYTHON.parents[1]
    try:
        call([sys.executable, "-m", "venv", str(folder)])
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "project.pth").write_text(sysconfig.get_path("purelib"))
        pip = [str(RAY_PYTHON), "-m", "pip", "install", "--quiet"]
        call([*pip, "--constraint", str(CONSTRAINTS), RAY])
    except (OSError, subprocess.SubprocessError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def call(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60 * _MINUTES
    )


def main() -> None:
    """Install what is missing, and write why something could not be installed."""
    reasons = {}
    for launcher in (*PACKAGES, "Ray"):
        if is_installed(launcher):
            continue
        print(f"Installing {launcher}", flush=True)
        try:
            if launcher == "Ray":
                install_ray()
            else:
                install_packages(PACKAGES[launcher])
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reasons[launcher] = f"cannot be installed: {output.strip()[-300:]}"
            print(f"{launcher} {reasons[launcher]}", flush=True)
    REASONS.parent.mkdir(parents=True, exist_ok=True)
    REASONS.write_text(json.dumps(reasons))


if __name__ == "__main__":
    main()
