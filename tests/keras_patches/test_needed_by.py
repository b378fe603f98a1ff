"""The table of the tests that need each patch lists every patch, and existing tests."""

import contextlib
import io
import pathlib

import keras
import pytest

from keras_strategy.keras_patches.installation import all_patches
from tests.keras_patches.dropping import name_of
from tests.keras_patches.needed_by import NEEDED_BY


def test_every_patch_names_a_test():
    # Other versions of Keras need other patches, too.
    if not keras.__version__.startswith("3.15."):
        pytest.skip("the table is of Keras 3.15")
    ours = {
        name_of(patch)
        for patch in all_patches()
        if patch.needed is None or patch.needed()
    }
    assert ours <= set(NEEDED_BY)
    backend = keras.backend.backend()
    here = {name for name, (where, _) in NEEDED_BY.items() if where == backend}
    assert here <= ours, "not a patch of this backend, or not needed here"


def test_named_tests_exist(monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    backend = keras.backend.backend()
    names = {name for where, name in NEEDED_BY.values() if where == backend}
    monkeypatch.chdir(root)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(["--collect-only", "-q", *sorted(names)])
    assert status == 0, printed.getvalue()
