"""Command line of the conformance suite.

    python -m conformance [--system NAME ...] [--only NAME ...] [--replicas 2 3]

Without arguments it runs everything and writes docs/conformance.md. Systems that ran
every program replace their results of an earlier run, and the page is written again
once all systems have results. Programs that `--only` selects are printed and not kept.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

from conformance import report, systems
from conformance.environments import BUILD, ROOT, variables
from conformance.program import REPLICAS, select

RESULTS = BUILD / "conformance.json"


def run_system(
    system: systems.System, replicas: list[int], only: list[str], folder: str
) -> list[dict]:
    """Run the cells of a system in its environment, and return them."""
    command = [sys.executable, "-m", "conformance.server", system.name]
    command += ["--folder", folder, "--replicas", *map(str, replicas)]
    command += ["--only", *only]
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables(system.backend, system.environment),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                lines.append(json.loads(text))
                if "program" in lines[-1]:
                    print(report.progress(lines[-1]), flush=True)
    if process.returncode:
        print(f"{system.name} ended with {process.returncode}", file=sys.stderr)
    return lines


def main() -> int:
    """Run the systems and write or print the results."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    add = parser.add_argument
    add("--system", nargs="+", default=[], help="such as accelerate")
    add("--only", nargs="+", default=[], help="such as batch_norm")
    add("--replicas", nargs="+", type=int, default=list(REPLICAS))
    add("--jobs", type=int, default=os.cpu_count() or 1)
    add("--report", action="store_true", help="write the page of earlier runs")
    options = parser.parse_args()
    try:
        chosen = systems.select(options.system)
        programs = select(options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.report:
        report.write_page(json.loads(RESULTS.read_text()))
        return 0
    start = time.monotonic()
    for system in chosen:
        variables(system.backend, system.environment)  # installs one at a time
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        futures = [
            pool.submit(run_system, s, options.replicas, options.only, folder)
            for s in chosen
        ]
        lines = [future.result() for future in futures]
    minutes = (time.monotonic() - start) / 60
    results = {
        system.name: {
            "date": datetime.date.today().isoformat(),
            "minutes": minutes / len(chosen),
            "lines": found,
        }
        for system, found in zip(chosen, lines, strict=True)
    }
    print(report.tables(results, programs))
    print(f"\n{minutes:.1f} minutes")
    if not options.only and options.replicas == list(REPLICAS):
        earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results = {**earlier, **results}
        RESULTS.write_text(json.dumps(results))
        if results.keys() == systems.ALL.keys():
            report.write_page(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
