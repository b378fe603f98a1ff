"""Run the test suite once per backend.

    python tools/run_tests.py [--full] [PYTEST-ARGUMENT ...]

Without arguments it runs every behaviour once. `--full` runs the tests that are marked
`full` instead: long tables, combinations and rare faults. Arguments of pytest, such as
the path of a file, select from all tests.

A process has one Keras backend, so there is one pytest process per backend and part of
the suite (`--part`, see tests/conftest.py). Four run at once on two cores, since some
wait, and more on more cores. The output of a process is printed when it has ended. All
of them run even when one fails. The environment variable BACKENDS names the backends.
The exit status is non-zero if a test failed or no test ran.
"""

import collections
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = os.environ.get("BACKENDS", "jax torch tensorflow").split()
# The longest parts first, and beside them those that mostly wait, so that no core is
# idle at the end.
PARTS = [
    ("tensorflow", "training"),
    ("tensorflow", "single"),
    ("torch", "single"),
    ("tensorflow", "processes"),
    ("jax", "processes"),
    ("torch", "processes"),
    ("jax", "single"),
    ("jax", "training"),
    ("torch", "training"),
]
SLOWEST = 10


@dataclass
class Result:
    """Counts and times of one backend's tests."""

    backend: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # with those of the processes that it started
    note: str = ""
    durations: list[tuple[float, str]] = field(default_factory=list)
    files: collections.Counter[str] = field(default_factory=collections.Counter)

    def __str__(self):
        line = (
            f"{self.backend + ':':<12}{self.passed} passed, {self.failed} failed, "
            f"{self.skipped} skipped in {self.seconds:.0f} s, "
            f"{self.cpu_seconds:.0f} s of CPU"
        )
        return f"{line} ({self.note})" if self.note else line

    def add(self, other: "Result"):
        """Add the result of a part of the backend's tests."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.note = "; ".join(filter(None, (self.note, other.note)))
        self.durations += other.durations
        self.files += other.files


def run(
    backend: str,
    arguments: list[str],
    report: Path,
    variables: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> Result:
    """Run pytest on one backend and count what it reports.

    Args:
        backend: The name of the Keras backend.
        arguments: Arguments of pytest.
        report: The JUnit report that pytest writes.
        variables: Further environment variables.
        output: The file for its output; None prints it.
    """
    # The Makefile exports these too, and says why.
    environment = {"NPROC": "8", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    environment.update(variables or {}, KERAS_BACKEND=backend)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    start = time.monotonic()
    if output is None:
        print(f"\n=== {backend} ===", flush=True)
        status, cpu = call(command, environment)
    else:
        with open(output, "wb") as file:
            status, cpu = call(command, environment, stdout=file, stderr=file)
    result = Result(backend, seconds=time.monotonic() - start, cpu_seconds=cpu)

    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skip = int(suite.get("skipped", 0))
            # A test whose teardown fails too counts twice among the bad ones.
            result.passed += max(int(suite.get("tests", 0)) - bad - skip, 0)
            result.failed += bad
            result.skipped += skip
            for test in suite.iter("testcase"):
                seconds, file = float(test.get("time", 0)), test.get("classname", "")
                result.durations.append((seconds, f"{file}.{test.get('name')}"))
                result.files[file] += seconds
        if result.passed + result.failed + result.skipped == 0:
            result.note = "no test ran"
    else:
        result.note = "it died before its report"
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and "-m" in arguments:
        return result  # None of this part's tests has the mark.
    if status and not result.failed:
        result.failed = 1
        result.note = f"{result.note or 'no test failed'}, exit status {status}"
    return result


def call(
    command: list[str], environment: Mapping[str, str], **streams: Any
) -> tuple[int, float]:
    """Run a command and return its exit status and seconds of CPU."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def list_runs(selected: bool) -> list[tuple[str, str]]:
    """Return the backend and the part of each run, in the order of their start."""
    if selected:
        return [(backend, "") for backend in BACKENDS]
    return [(backend, part) for backend, part in PARTS if backend in BACKENDS]


def run_part(
    backend: str,
    part: str,
    arguments: list[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run one part, and print pytest's output when it has ended."""
    name = f"{backend} {part}".strip()
    # One call of print for all of it: other threads print at the same time.
    print(f"{time.strftime('%H:%M:%S')} {name} starts\n", end="", flush=True)
    report, output = folder / f"{name}.xml", folder / f"{name}.txt"
    selection = ["--part", part] if part else []
    result = run(backend, [*selection, *arguments], report, variables, output)
    text = output.read_text(errors="replace")
    end = f"{time.strftime('%H:%M:%S')} {result}\n"
    print(f"\n=== {name} ===\n{text}{end}", end="", flush=True)
    return result


def run_all(
    arguments: list[str], variables: Mapping[str, str] | None = None
) -> dict[str, Result]:
    """Run all backends, print a line for each and the sum, and return the results.

    Args:
        arguments: `--full`, and arguments of pytest.
        variables: Further environment variables.
    """
    start = time.monotonic()
    full = "--full" in arguments
    arguments = [argument for argument in arguments if argument != "--full"]
    selected = bool(arguments)
    if full or not selected:
        arguments += ["-m", "full" if full else "not full"]
    # Each holds a backend, and often several workers with one.
    at_once = max(4, (os.cpu_count() or 1) // 2)
    pool = concurrent.futures.ThreadPoolExecutor(at_once)
    sums = {backend: Result(backend) for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as folder, pool:
        futures = [
            pool.submit(run_part, *each, arguments, Path(folder), variables)
            for each in list_runs(selected)
        ]
        for future in futures:
            result = future.result()
            sums[result.backend].add(result)
    for backend, result in sums.items():
        print(f"\n=== the slowest of {backend}: tests, and files ===")
        for seconds, name in sorted(result.durations, reverse=True)[:SLOWEST]:
            print(f"{seconds:7.1f} s  {name}")
        for name, seconds in result.files.most_common(SLOWEST):
            print(f"{seconds:7.1f} s  {name}")
    print(f"\n=== all backends, in {time.monotonic() - start:.0f} s ===")
    for result in sums.values():
        print(result)
    passed = sum(result.passed for result in sums.values())
    failed = sum(result.failed for result in sums.values())
    skipped = sum(result.skipped for result in sums.values())
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return sums


def is_green(results: Mapping[str, Result]) -> bool:
    """Return whether tests passed and none failed."""
    return any(result.passed for result in results.values()) and not any(
        result.failed for result in results.values()
    )


if __name__ == "__main__":
    sys.exit(0 if is_green(run_all(sys.argv[1:])) else 1)
