"""docs/patches.md matches the patches in the code."""

import keras
import pytest

from tools import pages


def test_page_lists_patches_of_this_backend():
    page = pages.PAGES["patches"].read_text()
    if f"Keras {keras.__version__}" not in page:
        pytest.skip("the page was written for another version of Keras")
    found = pages.patch_tables(pages.patch_rows())
    assert len(found) >= 2
    for title, table in found.items():
        section = pages.section(title, table)
        assert section in page, f"run `make pages`: '{title}' has changed"


def test_every_patch_has_a_reason_and_a_condition():
    for row in pages.patch_rows():
        assert row["reason"].endswith("."), row["target"]
        assert len(row["condition"]) > 5


def test_inherited_docstring_is_refused():
    with pytest.raises(TypeError, match="must be a function of keras_strategy.*get"):
        pages.describe_condition({}.get)
