"""Runs one section: `python -m benchmarks.gpu.section TITLE SECONDS FILE`.

Each row is a line of the file as soon as it is known, so that they stay when the
section fails or takes too long.
"""

import json
import sys

from benchmarks.gpu import engine, sections
from benchmarks.gpu.table import SECTIONS


def main() -> None:
    title, seconds, path = sys.argv[1:]
    with open(path, "a") as file:
        if title == "about":
            rows = iter([engine.about()])
        else:
            (name,) = (s.rows for s in SECTIONS if s.title == title)
            rows = getattr(sections, name)(float(seconds))
        for row in rows:
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
