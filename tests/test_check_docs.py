"""Checks of docstrings and of names in the documentation (`make lint`)."""

import pathlib

import keras
import pytest

from tools import check_docs

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="the same on every backend: runs on torch",
)


def check(docstring: str) -> list[str]:
    source = f'def _f(count):\n    """{docstring}\n    """\n'
    return list(check_docs.check_docstrings(pathlib.Path("x.py"), source))


@pytest.mark.parametrize("first", ["What", "Whether", "Where", "How", "Has", "Notes"])
def test_check_docstrings_reports_question_words(first):
    (problem,) = check(f"{first} it does.")
    assert problem.startswith("x.py:1: expected a docstring that starts with a verb")
    assert repr(first) in problem


def test_check_docstrings_reports_arguments_that_repeat_their_name():
    (problem,) = check("Do it.\n\n    Args:\n        count: The count.\n")
    assert "argument `count` only repeats its name" in problem


def test_check_docstrings_accepts_plain_english():
    assert not check("Return it.\n\n    Args:\n        count: The workers to start.\n")


@pytest.mark.parametrize(
    "text",
    [
        "keras_strategy.training.nonsense",
        "keras_strategy.config.nonsense",
        "tools/nonsense.py",
        "`make nonsense`",
        "`keras-strategy nonsense --workers 2`",
        "`ks.nonsense`",
        "`ks.config.nonsense(2)`",
    ],
)
def test_find_unknown_names_reports_missing(text):
    targets = {"test", "lint"}
    assert len(check_docs.find_unknown_names(f"See {text}.", targets)) == 1


def test_find_unknown_names_accepts_existing():
    text = (
        "keras_strategy.config.set_logical_devices, tools/check_docs.py, `make test`, "
        "`keras-strategy run --workers 2`, `ks.config.set_logical_devices`"
    )
    assert not check_docs.find_unknown_names(text, {"test"})
