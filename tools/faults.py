"""Inject faults into workers at random, and write docs/faults.md.

    python tools/faults.py [pytest arguments]

The faults are in tests/faults. SEED, which is printed, draws COUNT of them, 100 by
default. They are injected once per backend, on all backends at the same time; the
environment variable BACKENDS selects some. The outcomes stay in build/faults, and the
page is written when every backend has run.
"""

import concurrent.futures
import datetime
import importlib.metadata
import os
import platform
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
REPORTS = ROOT / "build" / "faults"
NAMES = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}
BACKENDS = os.environ.get("BACKENDS", " ".join(NAMES)).split()
COUNT = os.environ.get("COUNT", "100")
SEED = os.environ.get("SEED", str(random.SystemRandom().randrange(1_000_000)))

HEAD = """\
# Injected faults

This page shows what the other workers do when one worker fails. Each test injects a
fault into one of two or three workers, at a random moment in one operation. The other
workers must:

- exit within 30 seconds, or within 30 seconds of their timeout if the fault cannot be
  detected earlier;
- return the [exit code](launcher.md#how-it-ends) that shows which worker failed;
- print a message that names the worker and the operation;
- leave no process, no temporary file and no file that cannot be loaded.

A cell shows the seconds until the last other worker ended, the longest of all injected
faults, and the number of faults in parentheses.

Network faults are injected between simulated machines, on Linux as root:

- A machine is cut off, cannot send, or cannot receive.
- Two workers are cut off from each other while the chief reaches both. Then the message
  names the operation and not the workers.
- All links delay or lose frames. The trained weights must not change.
- A worker uses the wrong interface. It is refused within 10 seconds where it matters.

`make faults` injects them and writes this page; `make test` injects a sample.
"""


def run(backend: str, arguments: list[str]) -> int:
    """Run the faults of one backend, and print the end of pytest's output."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    environment = {
        "NPROC": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "KERAS_BACKEND": backend,
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/faults", "-q", f"--faults={COUNT}"]
        + [f"--seed={SEED}", f"--junitxml={REPORTS / backend}.xml"]
        # What is known of each fault is among that alone.
        + ["-o", "junit_family=xunit1", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - began
    print(f"\n=== {backend}, {seconds:.0f} s ===\n{done.stdout}", flush=True)
    return done.returncode


def outcomes(report: Path) -> tuple[str, float, list[dict[str, str]]]:
    """Return a run's day and seconds, and the record of each fault that it planted."""
    root = ElementTree.parse(report).getroot()
    (suite, *_) = root.iter("testsuite")
    found = []
    for case in suite.iter("testcase"):
        known = {p.get("name", ""): p.get("value") or "" for p in case.iter("property")}
        failed = [*case.iter("failure"), *case.iter("error")]
        found.append({**known, "failed": "yes" if failed else ""})
    day, seconds = (suite.get("timestamp") or "")[:10], suite.get("time") or 0
    return day, float(seconds), found


def table(found: dict[str, list[dict[str, str]]]) -> str:
    """Return a row for each fault."""
    faults = dict.fromkeys(o["fault"] for each in found.values() for o in each)
    backends = " | ".join(NAMES[b] for b in found)
    lines = [
        f"| fault | {backends} | message of another worker |",
        "| --- |" + " --- |" * len(found) + " --- |",
    ]
    for fault in faults:
        of = {b: [o for o in each if o["fault"] == fault] for b, each in found.items()}
        told = [o["message"] for each in of.values() for o in each if o.get("message")]
        cells = " | ".join(map(cell, of.values()))
        lines.append(f"| {fault} | {cells} | {shown(told[0]) if told else '–'} |")
    return "\n".join(lines)


def cell(planted: list[dict[str, str]]) -> str:
    """Describe the outcome of one fault on one backend."""
    if not planted:
        return "–"
    failed = sum(bool(o["failed"]) for o in planted)
    longest = max(float(o.get("seconds") or 0) for o in planted)
    text = f"{longest:.1f} s ({len(planted)})"
    return f"**{failed} failed**, {text}" if failed else text


def shown(message: str) -> str:
    """Return a message shortened for a cell of a table."""
    message = " ".join(message.split()).replace("|", "\\|").replace("`", "'")
    message = re.sub(r"/\S*/", "", message)  # folders
    return f"`{message[:157]}...`" if len(message) > 160 else f"`{message}`"


def places(found: dict[str, list[dict[str, str]]]) -> str:
    """Return a table, of one cell, of the faults per operation."""
    counts: dict[str, int] = {}
    for each in found.values():
        for outcome in each:
            counts[outcome["place"]] = counts.get(outcome["place"], 0) + 1
    cell = ", ".join(f"{place} ({count})" for place, count in sorted(counts.items()))
    return f"| faults per operation, on all backends |\n| --- |\n| {cell} |"


def machine(runs: dict[str, tuple[str, float, list]]) -> str:
    """Return the day and duration of each run, and its machine and versions."""
    versions = {
        "jax": "jax",
        "torch": "torch",
        "tensorflow": "tensorflow_cpu",
    }
    told = []
    for backend, (day, seconds, planted) in runs.items():
        try:
            version = importlib.metadata.version(versions[backend])
        except importlib.metadata.PackageNotFoundError:
            version = ""
        date = datetime.date.fromisoformat(day)
        when = f"{date.day} {date:%B %Y}"
        name = f"{NAMES[backend]} {version}".strip()
        took = f"{len(planted)} in {seconds / 60:.0f} minutes"
        told.append(f"- {name} on {when} ({took})")
    cores = f"{os.cpu_count()} cores"
    return "\n".join(
        [
            f"Measured on one {platform.system()} machine with {cores} and no GPU, on "
            "which other programs ran too:",
            "",
            *told,
        ]
    )


def main() -> int:
    """Inject the faults, print the table, and write the page."""
    began = time.monotonic()
    print(f"{COUNT} faults on each of {', '.join(BACKENDS)}, SEED={SEED}", flush=True)
    # All at once, on two cores too: a worker that falls silent is waited for.
    with concurrent.futures.ThreadPoolExecutor(len(BACKENDS)) as pool:
        statuses = list(pool.map(lambda b: run(b, sys.argv[1:]), BACKENDS))
    reports = {b: REPORTS / f"{b}.xml" for b in NAMES}
    read = {b: outcomes(path) for b, path in reports.items() if path.exists()}
    found = {b: each for b, (*_, each) in read.items()}
    text = "\n\n".join([table(found), places(found), machine(read)])
    print(text)
    if found.keys() == NAMES.keys():
        PAGE.write_text(f"{HEAD}\n{text}\n")
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes, all together")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
