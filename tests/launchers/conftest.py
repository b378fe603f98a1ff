"""Fixtures of the tests that start programs by real launchers."""

import time

import keras
import pytest

from tests.launchers import recipes
from tests.launchers.installed import is_installed, missing_reasons

LAUNCHERS = {
    "test_mpi.py": ("Open MPI", "MPICH"),
    "test_slurm.py": ("Slurm",),
    "test_ray.py": ("Ray",),
}
_rows: list[str] = []


def pytest_ignore_collect(collection_path):
    """Ignore tests of launchers that nobody has tried to install."""
    known = missing_reasons()
    names = LAUNCHERS.get(collection_path.name, ())
    if names and not any(is_installed(n) or n in known for n in names):
        return True
    return None


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """The weights of the page's program on one device."""
    folder = tmp_path_factory.mktemp("one_device")
    recipes.write_program(folder)
    (output,) = recipes.run_all(["python train.py"], [folder])
    assert "replicas: 1" in output
    return recipes.read_weights(folder)


@pytest.fixture(scope="session")
def needs():
    """Skips a test whose launcher is not installed."""

    def check(launcher: str) -> None:
        if not is_installed(launcher):
            pytest.skip(f"{launcher} {missing_reasons().get(launcher, 'is missing')}")

    return check


@pytest.fixture
def compare(request, one_device):
    """Compares weights with one device's, for the table at the end."""
    start = time.monotonic()

    def check(weights) -> None:
        found = recipes.weight_difference(weights, one_device)
        seconds = time.monotonic() - start
        backend = keras.backend.backend()
        name = request.node.name
        _rows.append(f"{name:<45} {backend:<11} {found:.1e}  {seconds:4.0f} s")
        assert found <= recipes.TOLERANCE

    return check


def pytest_terminal_summary(terminalreporter):
    if _rows:
        terminalreporter.section("largest weight difference to one device")
        terminalreporter.write_line("\n".join(_rows))
