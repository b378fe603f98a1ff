"""Folders of packages that come before those of the virtual environment."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


def install(name: str, requirements: Sequence[str], no_deps: bool = True) -> Path:
    """Install packages, unless it is done.

    Args:
        name: The name of the folder under build/.
        requirements: The arguments for pip.
        no_deps: Whether to leave out what they depend on.

    Returns:
        The folder.
    """
    folder = BUILD / name
    if not folder.exists():
        print(f"Installing {folder.relative_to(ROOT)}", flush=True)
        BUILD.mkdir(exist_ok=True)
        # Only a complete installation gets the name that the next run looks for.
        with tempfile.TemporaryDirectory(dir=BUILD) as unfinished:
            target = Path(unfinished) / "packages"
            pip = [sys.executable, "-m", "pip", "install", "-qq"]
            pip += ["--no-deps"] * no_deps
            subprocess.run([*pip, f"--target={target}", *requirements], check=True)
            target.rename(folder)
    return folder
