"""Leave out each patch in turn and run the test that needs it, which must fail.

    python tools/drop_hooks.py [NAME ...]

It takes minutes: the test with the mark `needs_patch` runs for each of some eighty
patches, in a process forked from one that has imported Keras and the backend. NAME
selects the patches whose name contains it. The exit status is 1 if a test passed
without its patch.
"""

import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = os.environ.get("BACKENDS", "jax torch tensorflow").split()
VARIABLE = "KERAS_STRATEGY_TESTS_WITHOUT"


def drop_each(names: list[str]) -> int:
    """Run the tests of this process's backend and return how many passed."""
    import keras
    import pytest

    from keras_strategy.core.registry import get_engine
    from tests.keras_patches import dropping

    get_engine()
    # A process of its own, since the tests' modules may create strategies.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        tests = pool.apply(dropping.find_tests)
    unnoticed = 0
    for name, (backend, test) in tests.items():
        picked = not names or any(part in name for part in names)
        if backend != keras.backend.backend() or not picked:
            continue
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            os.environ[VARIABLE] = name  # for workers
            dropping.drop(name)
            with contextlib.redirect_stdout(io.StringIO()):
                status = pytest.main(["-x", "-q", "--tb=no", test])
            os._exit(int(status))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # 1: a test failed. Below 0: it ended the process.
        noticed = status == 1 or status < 0
        unnoticed += not noticed
        said = "fails" if noticed else f"DOES NOT FAIL ({status})"
        seconds = time.monotonic() - start
        print(f"{backend:<11}{name}: {test} {said} ({seconds:.0f} s)", flush=True)
    return unnoticed


def main(arguments: list[str]) -> int:
    """Start a process for each backend."""
    unnoticed = 0
    for backend in BACKENDS:
        done = subprocess.run(
            [sys.executable, __file__, "--here", *arguments],
            cwd=ROOT,
            env={
                "NPROC": "8",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "KERAS_STRATEGY_LOGICAL_CPUS": "4",
                **os.environ,
                "KERAS_BACKEND": backend,
                "PYTHONPATH": str(ROOT),
            },
        )
        unnoticed += done.returncode
    print(f"{unnoticed} patches can be left out without a failing test")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        sys.exit(drop_each(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
