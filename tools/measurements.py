"""Repeat measurements of the documentation, and write their tables into its pages.

    python tools/measurements.py PAGE [TEXT]

Below a measured table, or line, its page names the command, the date and the commit:

    *Measured by `python -m benchmarks.memory` on 2026-12-01, commit 03868651.*

Each command of docs/PAGE.md that contains TEXT runs. The last table that it prints, or
else its last line, replaces what stands there.
"""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = re.compile(
    r"(?P<table>(?:^.+\n)+)\n\*Measured by `(?P<command>[^`]+)` on (?P<date>[\d-]+), "
    r"commit (?P<commit>[0-9a-f]{8})\.\*",
    re.MULTILINE,
)


def run(command: str) -> str:
    """Run a command of a mark, and return the table that it prints."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PATH": folders, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    tables = re.findall(r"(?:^\|.*\n)+", done.stdout, re.MULTILINE)
    return (tables or done.stdout.strip().splitlines())[-1].strip()


def repeat(page: Path, only: str, commit: str) -> None:
    """Measure the tables of a page again whose commands contain `only`."""
    for found in MEASURED.finditer(page.read_text()):
        command, today = found["command"], datetime.date.today()
        if only in command:
            table = run(command)
            line = f"*Measured by `{command}` on {today}, commit {commit}.*"
            # The page may have been edited since.
            page.write_text(page.read_text().replace(found[0], f"{table}\n\n{line}"))


def main(name: str, only: str = "") -> None:
    """Measure tables of a page again, by this commit."""
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    repeat(ROOT / "docs" / f"{name}.md", only, commit.stdout.strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
