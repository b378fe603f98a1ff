"""docs/hooks.md matches the patches in the code."""

import keras
import pytest

from tools import hooks_page


def test_page_lists_patches_of_this_backend():
    page = hooks_page.PAGE.read_text()
    if f"Keras {keras.__version__}" not in page:
        pytest.skip("the page was written for another version of Keras")
    found = hooks_page.sections(hooks_page.rows())
    assert len(found) >= 2
    for title, section in found.items():
        assert section in page, f"run `make hooks`: '{title}' has changed"


def test_every_patch_has_a_reason_and_a_condition():
    for row in hooks_page.rows():
        assert row["reason"].endswith("."), row["target"]
        assert len(row["condition"]) > 5


def test_inherited_docstring_is_refused():
    with pytest.raises(TypeError, match="must be a function of keras_strategy.*get"):
        hooks_page.describe_condition({}.get)
