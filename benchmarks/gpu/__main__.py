"""Runs all that GPUs can show: `python -m benchmarks.gpu --json FILE`.

Each section is a process: what fails or takes too long is kept in the result, and the
others go on. With `--rehearse` all of them run small, on CPU devices.
"""

import argparse
import concurrent.futures
import datetime
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import keras_strategy
from benchmarks.comparisons import BACKENDS
from benchmarks.gpu.report import report
from benchmarks.gpu.sections import ABOUT, SECTIONS, Section, run_section
from keras_strategy.testing import WorkerFailed, WorkerRunner, WorkerTimeout

# Two cores compile for longer than a machine that has GPUs.
REHEARSAL_FACTOR = 4


class Run:
    """A run until a monotonic time, whose result so far is kept in a file."""

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

    def find_gpus(self, backend: str) -> None:
        """Record what the backend is, and which GPUs it sees."""
        end = self._run(ABOUT, backend)
        (about,) = end["rows"] or [{"error": end["error"], "gpus": []}]
        self.result["engines"][backend] = about

    def section(self, section: Section, backend: str) -> None:
        """Run a section, or record the reason why not."""
        about = self.result["engines"][backend]
        found = 2 if self.result["rehearsal"] else len(about["gpus"])
        end = {"rows": [], "error": None, "seconds": 0.0}
        skipped = None
        if "error" in about:
            skipped = "the backend cannot be imported"
        elif found < section.gpus:
            skipped = f"it needs {section.gpus} GPU, there are {found}"
            skipped += f" (a build for {about['build']})"
        elif self._until - time.monotonic() < 10:
            skipped = "the time was over"
        else:
            end = self._run(section, backend)
        about = {"title": section.title, "backend": backend, "skipped": skipped}
        self.result["sections"].append(about | end)
        outcome = skipped or end["error"] or f"{len(end['rows'])} rows"
        seconds = f"{end['seconds']:.0f} s"
        print(f"{backend}, {section.title}: {outcome} [{seconds}]", flush=True)
        if self._file:
            with self._writing:
                Path(self._file).write_text(json.dumps(self.result, indent=1) + "\n")

    def _run(self, section: Section, backend: str) -> dict[str, Any]:
        began = time.monotonic()
        factor = REHEARSAL_FACTOR if self.result["rehearsal"] else 1
        limit = min(factor * section.seconds, self._until - began)
        is_divided = self.result["rehearsal"] and section.divided
        error = None
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows")
            with WorkerRunner(
                1, 2 if is_divided else None, limit, self._variables(backend)
            ) as runner:
                try:
                    runner.run(run_section, section.title, limit, str(out))
                except WorkerTimeout:
                    error = f"It took longer than {limit:.0f} s."
                except WorkerFailed as failure:
                    error = failure.ends[0].output[-6000:] or str(failure)
            lines = out.read_text().splitlines() if out.exists() else []
        # The last one may have been cut off.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {"rows": rows, "error": error, "seconds": time.monotonic() - began}

    def _variables(self, backend: str) -> dict[str, str | None]:
        variables: dict[str, str | None] = {
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_CONFIG": None,
            # Two processes share a GPU while they take turns.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
        if self.result["rehearsal"]:
            variables |= {"BENCHMARKS_GPU_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": ""}
            variables["JAX_PLATFORMS"] = "cpu"
        return variables


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="where the result is written")
    add("--table", metavar="FILE", help="the same as Markdown")
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    add("--only", default="", help="what a section's title must hold")
    add("--minutes", type=float, default=9.8, help="for all of it")
    add("--rehearse", action="store_true", help="small, with CPU devices for GPUs")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    run = Run(options.rehearse, until, options.json)
    selected = [s for s in SECTIONS if options.only in s.title]

    def compare_with_one_device(backend: str) -> None:
        run.find_gpus(backend)
        for section in selected:
            if not section.timed and backend in section.backends:
                run.section(section, backend)

    # What is not timed can run beside other backends.
    with concurrent.futures.ThreadPoolExecutor(options.rehearse or None) as pool:
        list(pool.map(compare_with_one_device, options.backends))
    for section in selected:
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
