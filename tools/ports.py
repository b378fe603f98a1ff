"""Run the ports of programs that others wrote, and write docs/ports.md.

    python tools/ports.py [pytest arguments]

The ports are in conformance/ports. Each runs on one device and on 2 and 3 replicas,
once per backend. The page is written if all of them ran.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ports.md"
NAMES = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}
BACKENDS = os.environ.get("BACKENDS", " ".join(NAMES)).split()

HEAD = """\
# Programs that others wrote

This page shows how programs of other projects train on several replicas. Each is a
short port of a tutorial, example or package, compared with one device on 2 and 3
replicas, or on workers of a coordinator. The last batch is not divisible by the
replicas.

- **A number** is the largest difference from one device in weights, logs and
  predictions. It is absolute for values up to 1 and relative above. Weights may differ
  by 2e-5, logs and predictions by 1e-5.
- **whole**: rows depend on each other, so the step [runs whole](whole_steps.md).
  **gathered**: a part of it computes on the rows of all replicas. A warning says so.
- **error**: several replicas raise an error that names the cause and the fix.

Random noise and dropout of a source are kept, with a seed. If the bias of attention
keys trains, SGD replaces Adam, which amplifies rounding there. The data are synthetic,
or scikit-learn's digits.

`make ports` runs all ports and writes this page; `make test-full` runs a sample. Ports
that need a missing package are skipped.
"""
WARNINGS = {"runs whole": "whole", "on the rows of all": "gathered"}


def run(backend: str, arguments: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the source, the cell and the reason of a dash of each port."""
    report = folder / f"{backend}.xml"
    environment = {
        "NPROC": "8",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "KERAS_BACKEND": backend,
    }
    subprocess.run(
        [sys.executable, "-m", "pytest", "tests/ports", "--ports", "all", "-q"]
        + [f"--junitxml={report}", *arguments],
        cwd=ROOT,
        env=environment,
    )
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = (case.get("name") or "").rstrip("]").partition("-")[2]
        cases.setdefault(name, []).append(case)
    return {name: outcome(each) for name, each in cases.items()}


def outcome(cases: list[ElementTree.Element]) -> dict[str, str]:
    """Summarise a port's runs on 2 and 3 replicas."""
    said = {
        p.get("name"): p.get("value") or "" for c in cases for p in c.iter("property")
    }
    found = {"source": said.get("source", "")}
    problems = [p for c in cases for p in (*c.iter("failure"), *c.iter("error"))]
    skipped = [skip.get("message") or "" for c in cases for skip in c.iter("skipped")]
    if problems:
        lines = (problems[0].get("message") or "").strip().splitlines() or [""]
        return {**found, "cell": f"**failed: {lines[0][:80]}**", "failed": "yes"}
    if skipped:
        return {**found, "cell": "–", "reason": skipped[0]}
    if "error" in said:
        return {**found, "cell": "error"}
    differences = [
        float(p.get("value") or 0)
        for case in cases
        for p in case.iter("property")
        if p.get("name") == "difference"
    ]
    if not differences:
        return {**found, "cell": "did not end", "failed": "yes"}
    said_of_rows = [w for text, w in WARNINGS.items() if text in said["warning"]]
    return {**found, "cell": " ".join((f"{max(differences):.0e}", *said_of_rows))}


def table(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the rows of the page: each port on each backend."""
    lines = [
        f"| port | {' | '.join(NAMES[b] for b in found)} |",
        "| --- |" + " --- |" * len(found),
    ]
    source, dashes = "", {}
    sources: dict[str, str] = {}
    for ports in found.values():
        for name, port in ports.items():
            sources.setdefault(name, port["source"])
    projects = [of.split(":")[0] for of in sources.values()]
    order = sorted(sources.items(), key=lambda x: projects.index(x[1].split(":")[0]))
    for name, of in order:
        each = {b: found[b].get(name, {"cell": "did not run"}) for b in found}
        if of.split(":")[0] != source:
            source = of.split(":")[0]
            lines.append(f"| **{source}** |" + " |" * len(found))
        cells = " | ".join(e["cell"] for e in each.values())
        lines.append(f"| {name}: `{of.partition(': ')[2] or of}` | {cells} |")
        for backend, e in each.items():
            if "reason" in e:
                dashes.setdefault(e["reason"], {}).setdefault(backend, []).append(name)
    lines += ["", "Reasons for dashes:", ""]
    for reason, of in dashes.items():
        where = [f"{told(ports)} on {NAMES[backend]}" for backend, ports in of.items()]
        lines.append(f"- {', '.join(where)}: {reason}")
    return "\n".join(lines)


def told(ports: list[str]) -> str:
    """Return the names of a few ports, or the number of many."""
    return ", ".join(ports) if len(ports) < 5 else f"{len(ports)} ports"


def main() -> int:
    """Print the table, and write the page if every port ran on every backend."""
    arguments = sys.argv[1:]
    folder = Path(os.environ.get("REPORTS", "") or tempfile.mkdtemp())
    found = {b: run(b, arguments, folder) for b in BACKENDS}
    text = table(found)
    print(text)
    if not arguments and list(NAMES) == BACKENDS:
        PAGE.write_text(f"{HEAD}\n{text.rstrip()}\n")
    return int(any("failed" in e for each in found.values() for e in each.values()))


if __name__ == "__main__":
    sys.exit(main())
