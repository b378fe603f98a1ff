"""The linter sees where Keras's private attributes are reached."""

import keras
import pytest

from tools import private_names

if keras.backend.backend() != "torch":
    pytest.skip("the same on every backend: it runs on torch", allow_module_level=True)

NAMES = {"_value", "_dtype"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("variable._value", [(1, "_value")]),
        ("x = 1\nmodel.layers[0].kernel._dtype", [(2, "_dtype")]),
        ("getattr(variable, '_value', None)", [(1, "_value")]),
        ("operator.attrgetter('_value')", [(1, "_value")]),
        ("variable.value, variable._ours, self._value", []),
        ("self._value = 1\nother._value", []),
    ],
)
def test_private_names_are_found(source, found):
    assert list(private_names.found_in(source, NAMES)) == found


def test_only_keras_names_are_reported():
    names = private_names.names_of_keras()
    assert {*NAMES, "_initial_epoch", "_convert_to_tensor", "_direct_assign"} <= names
    assert not {"value", "_ks_strategy", "__init__"} & names


def test_patch_modules_may_use_private_names():
    package = private_names.PACKAGE
    assert private_names.is_patch_module(package / "keras_patches" / "layers.py")
    assert private_names.is_patch_module(package / "backends" / "jax" / "patches.py")
    assert private_names.is_patch_module(package / "backends" / "jax" / "internals.py")
    assert not private_names.is_patch_module(package / "backends" / "jax" / "group.py")
