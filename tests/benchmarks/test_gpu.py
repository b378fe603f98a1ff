"""A run on GPUs, rehearsed on CPU devices: what fails leaves the others alone."""

import json
import time

import pytest

from benchmarks.gpu.__main__ import Run
from benchmarks.gpu.report import report
from benchmarks.gpu.sections import Section, about

ABOUT = {"keras": "3", "torch": "2", "build": "CPU", "gpus": []}


def run_of(tmp_path, rehearsal):
    run = Run(rehearsal, time.monotonic() + 120, str(tmp_path / "gpu.json"))
    run.result["engines"]["torch"] = ABOUT
    return run


def test_failed_section_is_reported(tmp_path):
    run = run_of(tmp_path, rehearsal=True)
    # No section has these titles.
    run.section(Section("unknown", about, 60), "torch")
    run.section(Section("slow", about, seconds=0.01), "torch")
    kept = json.loads((tmp_path / "gpu.json").read_text())
    failed, slow = kept["sections"]
    assert "ValueError: not enough values to unpack" in failed["error"]
    assert slow["error"] == "It took longer than 0 s."
    assert (failed["rows"], slow["rows"]) == ([], [])
    text = report(kept)
    assert "- torch, unknown: failed, ValueError" in text
    assert "- torch, slow: failed, It took longer" in text


def test_cpu_backend_is_reported(tmp_path):
    run = run_of(tmp_path, rehearsal=False)
    run.section(Section("any", about, 60), "torch")
    (section,) = run.result["sections"]
    assert section["skipped"] == "it needs 1 GPU, there are 0 (a build for CPU)"
    text = report(run.result)
    assert "- torch: keras 3, torch 2, build CPU; no GPU" in text


@pytest.mark.parametrize("equal, verdict", [(True, "equal"), (False, "**differs**")])
def test_equality_table_is_rendered(tmp_path, equal, verdict):
    run = run_of(tmp_path, rehearsal=True)
    row = {"what": "SGD", "difference": [1e-7], "tolerance": [1e-5], "equal": equal}
    section = {"title": "equality", "backend": "torch", "skipped": None}
    run.result["sections"].append({**section, "rows": [row], "error": None})
    assert f"| torch | SGD | 1e-07 | 1e-05 | {verdict} |" in report(run.result)
