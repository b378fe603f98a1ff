"""Run Keras's own trainer and callback tests in a strategy's scope, once per backend.

The wheel of Keras ships `keras/src/trainers/trainer_test.py` and the tests of its
callbacks. Each test is run without a scope, in the scope of our MirroredStrategy over
two logical CPU devices, and in that of what Keras offers by itself (keras.distribution
on JAX, tf.distribute on TensorFlow). What passes without a scope should pass in ours;
the tests that do not are listed. This file is also the pytest plugin that enters the
scope.

    python tools/keras_trainer_tests.py [pytest arguments]
"""

import importlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = os.environ.get("BACKENDS", "jax torch tensorflow").split()
SCOPE = "KERAS_TESTS_SCOPE"  # "none", "ours" or "native"
DEVICES = ("cpu:0", "cpu:1")


def pytest_configure(config):
    """Make Keras's test cases enter the scope at the end of their setUp."""
    import keras_strategy as ks
    from keras_strategy.core.registry import get_engine

    kind = os.environ[SCOPE]
    ks.config.set_logical_devices("cpu", len(DEVICES))
    if kind == "none":
        return
    strategy = (
        ks.MirroredStrategy(DEVICES)
        if kind == "ours"
        else get_engine().native_strategy(DEVICES)
    )
    test_case = importlib.import_module("keras.src.testing.test_case")

    set_up = test_case.TestCase.setUp

    def set_up_in_scope(self):
        set_up(self)
        scope = strategy.scope()
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)

    test_case.TestCase.setUp = set_up_in_scope


def outcomes(backend: str, kind: str, arguments: list[str], folder: Path) -> dict:
    """Return each test's outcome: "passed", "skipped", or its error's first line."""
    report = folder / f"{backend}-{kind}.xml"
    environment = {
        "NPROC": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
        SCOPE: kind,
    }
    import keras

    source = Path(keras.__file__).parent / "src"
    tests = [source / "trainers" / "trainer_test.py", source / "callbacks"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "keras_trainer_tests"]
        # What imports more than is installed cannot run, without a scope either.
        + ["--continue-on-collection-errors"]
        + ["-c", os.devnull, "-p", "no:cacheprovider", "--timeout=300", "-W", "ignore"]
        + [f"--rootdir={folder}", f"--junitxml={report}", *map(str, tests), *arguments],
        cwd=folder,
        env=environment,
        stdout=(folder / f"{backend}-{kind}.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    if not report.exists():
        return {}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            lines = (problem.get("message") or "").strip().splitlines() or [""]
            found[name] = lines[0]
        else:
            skipped = case.find("skipped") is not None
            found[name] = "skipped" if skipped else "passed"
    return found


def main() -> int:
    """Print the counts and the tests that fail only in a scope."""
    arguments = sys.argv[1:]
    folder = Path(os.environ.get("REPORTS", "") or tempfile.mkdtemp())
    bad = 0
    for backend in BACKENDS:
        plain = outcomes(backend, "none", arguments, folder)
        passing = [name for name, outcome in plain.items() if outcome == "passed"]
        if not passing:
            print(f"{backend}: no test ran; see {folder}")
            bad += 1
            continue
        print(f"{backend}: {len(passing)} tests pass without a scope")
        kinds = ["ours"] if backend == "torch" else ["ours", "native"]
        for kind in kinds:
            inside = outcomes(backend, kind, arguments, folder)
            failing = {
                name: inside.get(name, "did not run")
                for name in passing
                if inside.get(name) != "passed"
            }
            print(f"  {kind}: {len(passing) - len(failing)} of them pass")
            if kind == "ours":
                bad += len(failing)
                for name, message in failing.items():
                    print(f"    {name}: {message[:160]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
