"""The files for GitHub name versions and targets that exist."""

import pathlib
import re

import keras
import pytest

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "torch", reason="runs on torch"),
    pytest.mark.skipif(not WORKFLOW.exists(), reason="a source archive lacks them"),
]


def test_pre_commit_has_the_pinned_ruff():
    (rev,) = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert f"\nruff=={rev}\n" in (ROOT / "constraints.txt").read_text()


def test_workflow_calls_targets_of_make():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if "run" in step]
    called = [re.fullmatch(r"make (?:-k )?([a-z-]+).*", step["run"]) for step in steps]
    makefile = (ROOT / "Makefile").read_text()
    assert [match[1] for match in called] == ["test", "lint", "docs"]
    assert all(f"\n{match[1]}:" in makefile for match in called)
