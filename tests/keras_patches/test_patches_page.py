"""docs/hooks.md is what the code says."""

import keras
import pytest

from tools import hooks_page


def test_the_page_lists_the_hooks_of_this_backend():
    page = hooks_page.PAGE.read_text()
    if f"Keras {keras.__version__}" not in page:
        pytest.skip("the page is of another version of Keras")
    found = hooks_page.sections(hooks_page.rows())
    assert len(found) >= 2
    for title, section in found.items():
        assert section in page, f"`make hooks` writes '{title}' anew"


def test_every_hook_says_why():
    for row in hooks_page.rows():
        assert row["why"].endswith((".", "?")), row["target"]
        assert len(row["when"]) > 5
