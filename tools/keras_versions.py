"""Run the test suite on other versions of Keras, once per backend.

Each version is installed into a folder of its own under build/, without what it depends
on: the engines stay those of the virtual environment. In the subprocess, this file is
the pytest plugin that refuses any other Keras than the one that was asked for.

    python tools/keras_versions.py [--full] [PYTEST-ARGUMENT ...]

The arguments are those of tools/run_tests.py, which runs the suite. The environment
variables KERAS_VERSIONS ("3.13 nightly") and BACKENDS pick from the table.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import package_folders
import run_tests

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = "KERAS_VERSIONS_FOLDER"

# Arguments for pip by version. "==3.13.*" is the newest patch release.
REQUIREMENTS = {
    "3.13": ["keras==3.13.*"],
    "3.14": ["keras==3.14.*"],
    "3.15": ["keras==3.15.*"],
    "nightly": ["--pre", "keras-nightly"],
}


def pytest_configure(config):
    """End the run unless the imported Keras is the one in the folder."""
    import keras

    folder = os.environ[EXPECTED]
    if not Path(keras.__file__).is_relative_to(folder):
        raise RuntimeError(f"Keras was imported from {keras.__file__}, not {folder}")
    found, expected = keras.__version__, version_in(Path(folder))
    if found != expected:
        raise RuntimeError(f"This is Keras {found}, where {expected} was installed")
    print(f"Keras {found} on {keras.config.backend()}", flush=True)


def version_in(folder: Path) -> str:
    """Return the version of the one distribution in `folder`."""
    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    return distribution.version


def install(name: str) -> Path:
    """Install a version of Keras, if it is not there, and return its folder."""
    return package_folders.install(f"keras-{name}", REQUIREMENTS[name])


def main(arguments: list[str]) -> int:
    """Print a table: a line for each version, a column for each backend."""
    names = os.environ.get("KERAS_VERSIONS", "").split() or list(REQUIREMENTS)
    table = []
    green = True
    for name in names:
        folder = install(name)
        version = version_in(folder)
        print(f"\n##### Keras {version} #####", flush=True)
        environment = {
            EXPECTED: str(folder),
            # Both this plugin's folder and Keras's come before what is installed.
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tools")]),
            "PYTEST_ADDOPTS": "-p keras_versions",
        }
        results = run_tests.run_all(arguments, environment)
        green = green and run_tests.is_green(results)
        table.append(
            [
                version,
                *(f"{r.passed} / {r.failed} / {r.skipped}" for r in results.values()),
            ]
        )
    print("\npassed / failed / skipped\n")
    print("| Keras | " + " | ".join(run_tests.BACKENDS) + " |")
    print("| --- |" + " --- |" * len(run_tests.BACKENDS))
    for row in table:
        print("| " + " | ".join(row) + " |", flush=True)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
