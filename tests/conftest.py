"""Every test runs on the Keras backend in use, on up to 4 logical CPU devices."""

import gc
import importlib.util
import os
import pathlib
import signal

from tests.xla_flags import find_known_flags

# Without it XLA's CPU devices can starve each other on a machine of few cores; make
# sets it too.
os.environ.setdefault("NPROC", "8")
# Torch's threads wait for work by spinning: several processes take each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch's compiler starts to compile beside it imports torch, in each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Most of what tests on JAX cost is compiling programs that run a few times: less than
# half of it with these.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {find_known_flags()}"
# Programs that are equal are compiled once, in this run and in the next. What compiled
# them and how is part of what they are found by.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Nobody reads which lines of Python the operations of a program come from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import tools.quick_keras  # noqa: F401, I001 - before all that imports Keras
import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.marks import select_full
from tests.testing.warm_starter import WarmStarter

# Not by the environment variable: programs that tests start would inherit it, and
# import an engine with the package.
ks.config.set_logical_devices("cpu", 4)

# A shell has what it starts in the background ignore Ctrl-C, which tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)

if keras.backend.backend() == "tensorflow":
    from tests.untuned import leave_untuned

    leave_untuned()

# The engine's modules stay, and are a million objects to look through for garbage. What
# a test leaves is little beside them: a twelfth of the time went into looking for it.
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 50)

# The tests in these directories use no backend, so they run once.
ENGINELESS = {"benchmarks", "cluster", "commands", "testing"}


# Tests that start processes with a backend: the other parts need no warm starter.
PROCESSES = {
    *("faults", "launchers", "ports", "speed", "distributed"),
    *(
        "test_examples.py",
        "test_imports.py",
        "test_killed_process.py",
        "test_late_patches.py",
    ),
    *("test_paired_processes.py", "test_parameter_servers.py", "test_threads.py"),
}
TESTS = pathlib.Path(__file__).parent


def part_of(path: pathlib.Path) -> str:
    """The part of the suite that a file belongs to."""
    folder = path.relative_to(TESTS).parts[0]
    if {folder, path.name} & PROCESSES or path.stem.endswith("_workers"):
        return "processes"
    # The tests of training are divided between two parts that take about as long.
    return "training" if folder == "training" and path.name > "test_d" else "single"


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=("single", "training", "processes"),
        help="run a part of the suite, as tools/run_tests.py does",
    )


def pytest_ignore_collect(collection_path, config):
    part = config.getoption("--part")
    if part and collection_path.is_file() and part_of(collection_path) != part:
        return True
    return None


def pytest_sessionfinish():
    """Leave nothing for pytest, which looks for garbage five times at the end."""
    gc.freeze()


def is_engineless(item):
    """A resolver's test that asks an engine says with a `skipif` which one."""
    folder = item.path.relative_to(TESTS).parts[0]
    if folder == "cluster_resolver":
        return not item.get_closest_marker("skipif")
    return folder in ENGINELESS


def pytest_collection_modifyitems(items):
    select_full(items, keras.backend.backend())
    if keras.backend.backend() == "torch":
        return
    for item in items:
        if is_engineless(item):
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


def _found(module: str) -> list[str]:
    return [module] if importlib.util.find_spec(module) else []


@pytest.fixture(scope="session")
def starter():
    """Starts workers that have Keras and the engine imported."""
    # `keras.utils.set_random_seed` imports TensorFlow on every backend, for seconds.
    with WarmStarter(["tools.quick_keras", *_found("tensorflow")]) as starter:
        yield starter


@pytest.fixture
def program(starter, tmp_path):
    """Runs a program to its end, in a process that has Keras and the engine imported.

    It has the logical devices that it asks for, and `keras_strategy` is not imported.
    """

    def run(script: pathlib.Path | str, *arguments: object, **environment: str):
        if isinstance(script, str):
            text, script = script, tmp_path / "program.py"
            script.write_text(text)
        variables = {"KERAS_STRATEGY_LOGICAL_CPUS": None, **environment}
        with WorkerRunner(
            1, timeout_seconds=280, environment=variables, starter=starter
        ) as runner:
            runner.start(script, *arguments)
            (end,) = runner.wait()
        return end

    return run


@pytest.fixture(
    params=[
        pytest.param(2, marks=pytest.mark.full),
        3,
        pytest.param(4, marks=pytest.mark.full),
    ],
    ids=lambda n: f"{n}replicas",
)
def replicas(request) -> int:
    return request.param


@pytest.fixture
def mirrored():
    """Makes the strategy of a number of logical CPU devices."""

    def make(replicas: int) -> ks.MirroredStrategy:
        return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    return make


@pytest.fixture
def audit_mode():
    """Sets the mode of the audit for a test."""
    yield ks.config.audit
    ks.config.audit("exact")


@pytest.fixture
def two(mirrored) -> ks.MirroredStrategy:
    return mirrored(2)
