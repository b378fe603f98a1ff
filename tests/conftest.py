"""Every test runs on the Keras backend in use, on up to 4 logical CPU devices."""

import os
import pathlib

# Without it XLA's CPU devices can starve each other on a machine of few cores; make
# sets it too.
os.environ.setdefault("NPROC", "8")
# Before anything asks for devices, which settles how many there are.
os.environ["KERAS_STRATEGY_LOGICAL_CPUS"] = "4"

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WarmStarter

# What these rooms hold knows no engine, and is tested once.
ENGINELESS = {"benchmarks", "coordination", "launch", "testing"}


# What starts processes that have an engine.
PROCESSES = {"speed", "workers", "test_examples.py", "test_imports.py"}
TESTS = pathlib.Path(__file__).parent


def part_of(path: pathlib.Path) -> str:
    """The part of the suite that a file belongs to."""
    room = path.relative_to(TESTS).parts[0]
    if room in ENGINELESS:
        return "engineless"
    workers = path.stem.endswith("_workers")
    return "processes" if room in PROCESSES or workers else "single"


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=("single", "processes", "engineless"),
        help="run a part of the suite, as tools/run_tests.py does",
    )


def pytest_ignore_collect(collection_path, config):
    part = config.getoption("--part")
    if part and collection_path.is_file() and part_of(collection_path) != part:
        return True
    return None


def pytest_collection_modifyitems(items):
    if keras.backend.backend() == "torch":
        return
    for item in items:
        if part_of(item.path) == "engineless":
            reason = "the same on every backend: it runs on torch"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _clean():
    """A test starts from the same seed and leaves no strategy in charge."""
    keras.utils.set_random_seed(0)
    yield
    assert not ks.has_strategy(), "the test left a strategy in charge"
    distribution = keras.distribution.distribution()
    assert distribution is None, "the test left a Keras distribution in charge"


@pytest.fixture(scope="session")
def starter():
    """Starts workers that have Keras and the engine imported."""
    with WarmStarter() as starter:
        yield starter


@pytest.fixture(params=[2, 3, 4], ids=lambda n: f"{n}replicas")
def replicas(request) -> int:
    return request.param


@pytest.fixture
def mirrored():
    """Makes the strategy of a number of logical CPU devices."""

    def make(replicas: int) -> ks.MirroredStrategy:
        return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    return make


@pytest.fixture
def two(mirrored) -> ks.MirroredStrategy:
    return mirrored(2)
