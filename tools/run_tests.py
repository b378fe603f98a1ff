"""Run the test suite once per backend; arguments are passed on to pytest.

A process has one Keras backend, so there is one pytest process for each. All of them
run even when one fails. The backends come from the environment variable BACKENDS.
The exit status is non-zero when any run failed or no test ran at all.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = os.environ.get("BACKENDS", "jax torch tensorflow").split()


@dataclass
class Result:
    """What one backend's run gave."""

    backend: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str

    def __str__(self):
        line = (
            f"{self.backend + ':':<12}{self.passed} passed, {self.failed} failed, "
            f"{self.skipped} skipped in {self.seconds:.0f} s"
        )
        return f"{line} ({self.note})" if self.note else line


def run(
    backend: str,
    arguments: list[str],
    report: Path,
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run pytest on one backend and count what it reports.

    Args:
        backend: The name of the Keras backend.
        arguments: For pytest.
        report: The file that pytest writes what happened to.
        variables: Further environment variables.
    """
    # What make exports is repeated here for those who call this file directly; the
    # Makefile says why.
    environment = {"NPROC": "8", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    environment.update(variables or {}, KERAS_BACKEND=backend)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    print(f"\n=== {backend} ===", flush=True)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    seconds = time.monotonic() - start

    passed = failed = skipped = 0
    note = ""
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skip = int(suite.get("skipped", 0))
            # A test whose teardown fails too counts twice among the bad ones.
            passed += max(int(suite.get("tests", 0)) - bad - skip, 0)
            failed += bad
            skipped += skip
        if passed + failed + skipped == 0:
            note = "no test ran"
    else:
        note = "it died before its report"
    if status and not failed:
        failed = 1
        note = f"{note or 'no test failed'}, exit status {status}"
    return Result(backend, passed, failed, skipped, seconds, note)


def main(arguments: list[str]) -> int:
    """Run all backends, print a line for each and the sum."""
    with tempfile.TemporaryDirectory() as folder:
        results = [
            run(backend, arguments, Path(folder) / f"{backend}.xml")
            for backend in BACKENDS
        ]
    passed = sum(result.passed for result in results)
    failed = sum(result.failed for result in results)
    skipped = sum(result.skipped for result in results)
    print("\n=== all backends ===")
    for result in results:
        print(result)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
