"""The table of the tests that need each hook names all hooks, and tests that exist."""

import pathlib

import keras
import pytest

from keras_strategy.hooks.installed import all_hooks
from tests.hooks.needed_by import NEEDED_BY, UNSHOWN


def test_every_hook_has_a_test_that_needs_it():
    # Other versions of Keras need others, too.
    if not keras.__version__.startswith("3.15."):
        pytest.skip("the table is of Keras 3.15")
    ours = {hook.name for hook in all_hooks() if hook.is_needed()}
    assert ours <= set(NEEDED_BY)
    assert set(UNSHOWN) <= set(NEEDED_BY)
    backend = keras.backend.backend()
    here = {name for name, (where, _) in NEEDED_BY.items() if where == backend}
    assert here <= ours, "they are gone, or not needed here"


def test_the_tests_are_there(program):
    root = pathlib.Path(__file__).parents[2]
    backend = keras.backend.backend()
    names = {name for where, name in NEEDED_BY.values() if where == backend}
    end = program(
        "import pytest, sys; sys.exit(pytest.main(['--collect-only', *sys.argv[1:]]))",
        *sorted(str(root / name) for name in names),
    )
    assert end.exit_status == 0, end.output
