"""Run the test suite on other versions of Python, Keras and the backends.

    python tools/versions.py [--full] [PYTEST-ARGUMENT ...]

The arguments are those of tools/run_tests.py, which runs the suite. The environment
variables VERSIONS ("keras-3.13 python-3.13") and BACKENDS pick from the table.

Each version of a package is installed into a folder of its own under build/, which
comes before the virtual environment; the other packages stay those of constraints.txt.
Python 3.12 and 3.13 get a virtual environment with JAX alone, since its versions need
them: of 3.13, the newest version that pyproject.toml allows. In the subprocess, this
file is the pytest plugin that refuses any other version.
"""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("jax", "torch", "tensorflow")
EXPECTED = "VERSIONS_FOLDER"

# Arguments for pip by version. "==3.13.*" is the newest patch release.
REQUIREMENTS = {
    "3.13": ["keras==3.13.*"],
    "3.14": ["keras==3.14.*"],
    "3.15": ["keras==3.15.*"],
    "nightly": ["--pre", "keras-nightly"],
}
ENGINES = {
    "torch-2.14": ["torch==2.14.*"],
    "torch-2.15": ["torch==2.15.*"],
    "tensorflow-2.22": ["--pre", "--no-deps", "tensorflow-cpu==2.22.*"],
}
PYTHONS = {"python-3.12": ["jax==0.11.*"], "python-3.13": []}
NAMES = [*(f"keras-{version}" for version in REQUIREMENTS), *ENGINES, *PYTHONS]
# What the suite needs besides JAX; it skips tests of further packages.
TEST_PACKAGES = ["pytest", "pytest-timeout", "hypothesis", "trustme", "pandas", "grain"]
TEST_PACKAGES.append("scikit-learn")  # the demo's


def pytest_configure(config):
    """End the run unless the module of the version is the one in the folder."""
    folder = Path(os.environ[EXPECTED])
    module = importlib.import_module(folder.name.partition("-")[0])
    if not Path(module.__file__).is_relative_to(folder):
        raise RuntimeError(f"Expected a module in {folder}, got {module.__file__}")
    print(f"{module.__name__} {module.__version__}", flush=True)


def version_in(folder: Path) -> str:
    """Return the version of Keras or of the backend in `folder`."""
    package = folder.name.partition("-")[0]
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        if re.fullmatch(rf"{package}([-_](nightly|cpu))?", distribution.name):
            return distribution.version
    raise FileNotFoundError(f"Expected {package} in {folder}, found none.")


def install(name: str) -> Path:
    """Install a version of Keras, if it is not there, and return its folder."""
    import package_folders  # in the same folder; Python 3.13 need not find it

    return package_folders.install(f"keras-{name}", REQUIREMENTS[name])


def find_python(name: str) -> str | None:
    """Return a Python of this version that can make virtual environments."""
    version = name.removeprefix("python-")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    file = f"python{version}"
    for path in [file, *pyenv.glob(f"{version}*/bin/{file}")]:
        command = [shutil.which(path) or "", "-c", "import ensurepip, ssl"]
        if command[0] and not subprocess.run(command, capture_output=True).returncode:
            return command[0]
    return None


def make_environment(name: str, python: str) -> Path:
    """Return the Python of a virtual environment with JAX alone."""
    folder = ROOT / "build" / name
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-qq"]
    if not (folder / "installed").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pinned = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        lines = [line for line in lines if not re.match("jax|jaxlib|numpy|scipy", line)]
        pinned.write_text("\n".join(lines))
        packages = ["-e", f"{ROOT}[jax,coordinator]", *PYTHONS[name], *TEST_PACKAGES]
        subprocess.run([*pip, "-c", pinned, *packages], check=True)
        (folder / "installed").touch()
    return pip[0]


def run(name: str, arguments: list[str]) -> tuple[str, dict[str, str], bool] | None:
    """Run one row; return its versions, the results by backend, and if it is green."""
    python, environment = Path(sys.executable), dict(os.environ)
    backends = os.environ.get("BACKENDS", " ".join(BACKENDS)).split()
    if name in PYTHONS:
        found = find_python(name)
        if found is None:
            print(f"skipped: {name} was not found on PATH or in pyenv", flush=True)
            return None
        python, backends = make_environment(name, found), ["jax"]
        show = "import jax, sys; print(sys.version.split()[0], 'JAX', jax.__version__)"
        shown = subprocess.check_output([python, "-c", show], text=True)
        version = f"Python {shown.strip()}"
    else:
        import package_folders

        package, _, number = name.partition("-")
        if package == "keras":
            folder = install(number)
        else:
            folder = package_folders.install(name, ENGINES[name], no_deps=False)
            backends = [package]
        version = f"{package} {version_in(folder)}"
        environment |= {
            EXPECTED: str(folder),
            # Both this plugin's folder and the version's come before what is installed.
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tools")]),
            "PYTEST_ADDOPTS": "-p versions",
        }
    print(f"\n##### {version} #####", flush=True)
    environment["BACKENDS"] = " ".join(backends)
    command = [python, ROOT / "tools" / "run_tests.py", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    )
    results = {}
    line = r"^(\w+): +(\d+) passed, (\d+) failed, (\d+) skipped"
    assert process.stdout is not None
    for text in process.stdout:
        print(text, end="", flush=True)
        if found_line := re.match(line, text):
            backend, *counts = found_line.groups()
            results[backend] = " / ".join(counts)
    return version, results, process.wait() == 0


def main(arguments: list[str]) -> int:
    """Print a table: a line for each version, a column for each backend."""
    names = os.environ.get("VERSIONS", "").split() or NAMES
    rows = [row for row in (run(name, arguments) for name in names) if row]
    if len(rows) > 1:
        print("\npassed / failed / skipped\n")
        print("| Version | " + " | ".join(BACKENDS) + " |")
        print("| --- |" + " --- |" * len(BACKENDS))
        for version, results, _ in rows:
            cells = [results.get(backend, "") for backend in BACKENDS]
            print("| " + " | ".join([version, *cells]) + " |", flush=True)
    return 0 if all(is_green for *_, is_green in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
