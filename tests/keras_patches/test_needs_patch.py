"""Each patch has a test with the mark `needs_patch`."""

import pathlib

import keras
import pytest

from tests.keras_patches.dropping import find_tests, list_names


def test_every_patch_names_a_test(monkeypatch):
    # Other versions of Keras need other patches, too.
    if not keras.__version__.startswith("3.15."):
        pytest.skip("the marks are of Keras 3.15")
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    assert list_names() == set(find_tests())
