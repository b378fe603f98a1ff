"""Runs all that GPUs can show: `python -m benchmarks.gpu --json FILE`.

Each section is a process: what fails or takes too long is kept in the result, and the
others go on. With `--rehearse` all of them run small, on CPU devices.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import keras_strategy
from benchmarks.comparisons import BACKENDS
from benchmarks.gpu.report import report
from benchmarks.gpu.table import SECTIONS, Section

ROOT = Path(__file__).parents[2]
ABOUT = Section("about", "", 90)
# Two cores compile for longer than a machine that has GPUs.
PATIENCE = 4


class Run:
    """A run, and its result so far.

    Args:
        rehearsal: Whether CPU devices stand for GPUs.
        until: When it ends, by `time.monotonic`.
        file: Where the result is written after each section.
    """

    def __init__(self, rehearsal: bool, until: float, file: str | None) -> None:
        self._until, self._file = until, file
        self._writing = threading.Lock()
        self.result: dict[str, Any] = {
            "version": keras_strategy.__version__,
            "date": datetime.date.today().isoformat(),
            "rehearsal": rehearsal,
            "engines": {},
            "sections": [],
        }

    def ask(self, backends: list[str]) -> None:
        """Asks the engines what they are."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = pool.map(lambda backend: self._run(ABOUT, backend), backends)
            for backend, end in zip(backends, ends, strict=True):
                (about,) = end["rows"] or [{"error": end["error"], "gpus": []}]
                self.result["engines"][backend] = about

    def section(self, section: Section, backend: str) -> None:
        """Run a section, or record the reason why not."""
        about = self.result["engines"][backend]
        there = 2 if self.result["rehearsal"] else len(about["gpus"])
        end = {"rows": [], "error": None, "seconds": 0.0}
        if "error" in about:
            skipped = "the engine cannot be imported"
        elif there < section.gpus:
            skipped = f"it needs {section.gpus} GPU, there are {there}"
            skipped += f" (a build for {about['build']})"
        elif self._until - time.monotonic() < 10:
            skipped = "the time was over"
        else:
            skipped = None
            end = self._run(section, backend)
        said = {"title": section.title, "backend": backend, "skipped": skipped}
        self.result["sections"].append(said | end)
        said = skipped or end["error"] or f"{len(end['rows'])} rows"
        print(
            f"{backend}, {section.title}: {said} [{end['seconds']:.0f} s]", flush=True
        )
        if self._file:
            with self._writing:
                Path(self._file).write_text(json.dumps(self.result, indent=1) + "\n")

    def _run(self, section: Section, backend: str) -> dict[str, Any]:
        began = time.monotonic()
        patience = PATIENCE if self.result["rehearsal"] else 1
        limit = min(patience * section.seconds, self._until - began)
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "rows"), Path(folder, "log")
            command = [sys.executable, "-m", "benchmarks.gpu.section"]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, section.title, str(limit), str(out)],
                    cwd=ROOT,
                    env=self._environment(section, backend),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    status = process.wait(limit)
                    error = None if status == 0 else log.read_text()[-6000:]
                    error = error or (f"ended with status {status}" if status else None)
                except subprocess.TimeoutExpired:
                    error = f"It took longer than {limit:.0f} s."
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            lines = out.read_text().splitlines() if out.exists() else []
        # The last one may have been cut off.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {"rows": rows, "error": error, "seconds": time.monotonic() - began}

    def _environment(self, section: Section, backend: str) -> dict[str, str]:
        more = {
            "KERAS_BACKEND": backend,
            "NPROC": os.environ.get("NPROC", "8"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
            ),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Two processes share a GPU while they take turns.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
        if self.result["rehearsal"]:
            more |= {"BENCHMARKS_GPU_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": ""}
            more["JAX_PLATFORMS"] = "cpu"
            if section.divided:
                more["KERAS_STRATEGY_LOGICAL_CPUS"] = "2"
        return {**os.environ, **more}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="where the result is written")
    parser.add_argument("--table", metavar="FILE", help="the same as Markdown")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--only", default="", help="what a section's title must hold")
    parser.add_argument("--minutes", type=float, default=9.8, help="for all of it")
    parser.add_argument(
        "--rehearse", action="store_true", help="small, with CPU devices for GPUs"
    )
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    run = Run(options.rehearse, until, options.json)
    run.ask(list(options.backends))
    wanted = [s for s in SECTIONS if options.only in s.title]

    def compared(backend: str) -> None:
        for section in wanted:
            if not section.timed and backend in section.backends:
                run.section(section, backend)

    # What is not timed can run beside other engines.
    with concurrent.futures.ThreadPoolExecutor(options.rehearse or None) as pool:
        list(pool.map(compared, options.backends))
    for section in wanted:
        for backend in options.backends:
            if section.timed and backend in section.backends:
                run.section(section, backend)
    text = report(run.result)
    print(text)
    if options.table:
        Path(options.table).write_text(text)
    sections = run.result["sections"]
    rows = [row for section in sections for row in section["rows"]]
    failed = [s for s in sections if s["error"]] + [
        row for row in rows if not row.get("equal", True) or "error" in row
    ]
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
