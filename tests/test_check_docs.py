"""Checks of docstrings and of names in the documentation (`make lint`)."""

import pathlib
import re

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
        'install "keras-strategy[slurm]"',
        "pip install keras-strategy",
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


def check_page(text: str) -> list[str]:
    return list(check_docs.check_page("docs/x.md", f"# A page\n\n{text}\n"))


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("It trains. Where N is 2, it stops.", "'Where N is 2, it'"),
        ("- **What you set** counts.", "'- **What you set** counts.'"),
        ("## Whether it runs", "'## Whether it runs'"),
        ("It\nwaits in\nvain.", "'in vain'. Write instead: without a result"),
        ("| a row | a verdict |", "'verdict'. Write instead: failure diagnosis"),
        ("It runs" + " on" * 40 + ".", "42 words in 'It runs on on on'"),
    ],
)
def test_check_page_reports_line_and_words(text, reported):
    (problem,) = check_page(text)
    place, _, message = problem.partition(": ")
    assert place == f"docs/x.md:{4 if 'vain' in text else 3}"
    assert message.startswith(reported)


def test_check_page_reports_long_page():
    text = "It runs.\n" * 1300
    (problem,) = check_page(text)
    assert problem.startswith("docs/x.md:1: 2,603 words.")
    assert not list(check_docs.check_page("docs/errors.md", text))


@pytest.mark.parametrize(
    "text",
    [
        "## How it works",
        "Where does it run?",
        "See [the page](x.md). [What fit takes](y.md) lists them.",
        "It runs `in vain`.\n\n```python\n# Where the verdict is\n```",
        "<!-- set-up\n# What it tells\n-->",
        "\n".join(f"- `a b c`, {'word ' * 20}" for _ in range(9)),
    ],
)
def test_check_page_accepts_plain_english(text):
    assert not check_page(text)


@pytest.mark.parametrize("comment", ["# It is told.", '"""It.\n\nIt is told.\n"""'])
def test_find_phrases_of_code_reports_line(comment):
    source = f"x = 'is told'\n{comment}\n"
    (problem,) = check_docs.find_phrases_of_code(pathlib.Path("x.py"), source)
    line = 2 + comment.count("\n", 0, comment.index("told"))
    assert problem.startswith(f"x.py:{line}: 'is told'. Write instead: receives")


@pytest.mark.parametrize(
    "query",
    ["multiple gpus", "clip by global norm", "slow first step", "mixed precision"]
    + ["resume", "oom", "out of memory", "wandb", "optuna", "notebook"],
)
def test_search_finds_section(query):
    """A page has a section with each word, as the search of the site needs it."""
    pages = (check_docs.ROOT / "docs").glob("*.md")
    sections = [
        s for page in pages for s in re.split(r"^#+ ", page.read_text(), flags=re.M)
    ]
    assert any(
        set(query.split()) <= set(re.findall(r"\w+", s.lower())) for s in sections
    )


def test_long_pages_exist():
    for page in check_docs.LONG:
        assert (check_docs.ROOT / "docs" / f"{page}.md").exists()
