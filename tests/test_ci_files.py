"""The files for GitHub name versions and targets that exist."""

import pathlib
import re

import keras
import pytest

import keras_strategy

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
    targets = ["demo", "test", "lint", "docs", "wheel"]
    assert [match[1] for match in called] == targets
    assert all(f"\n{match[1]}:" in makefile for match in called)


def test_issue_forms_have_what_github_needs():
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert [form.stem for form in forms] == ["bug", "idea"]
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(content)
        ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0


def test_versions_are_the_same():
    (newest,) = re.findall(
        r"^## \[Unreleased\]\n(?:.*\n)*?## \[([\d.]+)\] - \d{4}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert newest == keras_strategy.__version__
    assert f"\nversion: {newest}\n" in citation


def test_ci_skips_a_missing_python(monkeypatch, tmp_path, capsys):
    from tools import versions

    (name,) = re.findall(r"VERSIONS=(\S+)", (ROOT / ".ci" / "run").read_text())
    monkeypatch.setenv("VERSIONS", name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert versions.main([]) == 0
    assert (
        capsys.readouterr().out
        == f"skipped: {name} was not found on PATH or in pyenv\n"
    )


def test_tested_ranges_end_with_versions_of_compat():
    from keras_strategy.commands.doctor import _TESTED
    from tools.versions import NAMES

    ends = {f"{package}-{last}" for package, (_, last) in _TESTED.items()}
    # A nightly build stands for the last Keras, Python 3.13 for the last JAX, too.
    assert ends - set(NAMES) == {
        f"keras-{_TESTED['keras'][1]}",
        f"jax-{_TESTED['jax'][1]}",
    }
