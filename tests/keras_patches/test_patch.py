"""A Keras that changed is refused, as a whole."""

import re
import sys
import types

import keras as installed_keras
import pytest

from keras_strategy.errors import KerasVersionError
from keras_strategy.keras_patches.installation import install_for
from keras_strategy.keras_patches.patch import (
    FunctionPatch,
    find_module,
    hook,
    install,
    multi_replica_only,
    patches_in,
)
from tests.keras_patches.dropping import name_of
from tools.pages import reason_of


def make():
    class Keras:
        def known(self, x, y: int = 1):
            return x + y

        @staticmethod
        def alone(x):
            return x

        @property
        def value(self):
            return 3

    return Keras


def marked(*functions):
    """The hooks of a module that has these functions."""
    module = types.ModuleType(__name__)
    vars(module).update({str(i): f for i, f in enumerate(functions)})
    return patches_in(module)


def test_known_function_is_replaced():
    keras = make()

    @hook(keras, "known", "(self, x, y=1)")
    def known(original, self, x, y=1):
        return original(self, x, y) * 10

    assert keras().known(1) == 2, "nothing is installed before install()"
    install(marked(known))
    assert keras().known(1) == 20
    assert keras.known.__name__ == "known"


def test_patch_may_require_some_parameters():
    keras = make()

    @hook(keras, "known", ("y",))
    def known(original, self, *args):
        return 7

    install(marked(known))
    assert keras().known(1) == 7


@pytest.mark.parametrize("name", ["value", "known", "alone"])
def test_condition_selects_and_returns_value(name):
    keras = make()
    found = []
    signature = {"value": None, "known": "(self, x, y=1)", "alone": "(x)"}[name]

    @hook(keras, name, signature, when=lambda: found[0] if found else None)
    def replaced(original, found, *args):
        return (found, original(*args))

    install(marked(replaced))

    def call():
        return keras().value if name == "value" else getattr(keras(), name)(1)

    assert call() == make_result(name)
    found.append("a replica")
    assert call() == ("a replica", make_result(name))


def make_result(name):
    return {"value": 3, "known": 2, "alone": 1}[name]


def test_condition_may_use_the_object():
    keras = make()
    ours = keras()

    @hook(keras, ("known", "value"), ("x",), when=lambda x: x if x is ours else None)
    def replaced(original, found, self, *args):
        assert found is self is ours
        return original.__name__

    known, _ = marked(replaced)
    install([known])
    assert (ours.known(1), keras().known(1)) == ("known", 2)


def test_multi_replica_patches_are_installed_late():
    keras = make()

    @hook(keras, "known", "(self, x, y=1)", when=multi_replica_only(lambda: 10))
    def known(original, ten, self, x, y=1):
        return ten

    @hook(keras, "value", None, multi_replica_only=True)
    def value(original, self):
        return 10

    install(marked(known, value))
    assert (keras().known(1), keras().value) == (2, 3)
    install_for(2)
    assert (keras().known(1), keras().value) == (10, 10)


def test_property_is_replaced_without_condition():
    keras = make()

    @hook(keras, "value", None)
    def value(original, self):
        return original(self) + 1

    install(marked(value))
    assert keras().value == 4


def test_patches_are_listed_in_source_order():
    keras = make()

    @hook(keras, "value", None)
    def value(original, self): ...

    @hook(keras, ("known", "alone"), ("x",))
    def others(original, *args):
        """Why they are hooked,
        in two lines.

        And more.
        """

    found = marked(value, others)
    assert [name_of(h) for h in found] == [
        f"{__name__} make.<locals>.Keras.{name}" for name in ("value", "known", "alone")
    ]
    assert reason_of(found[1]) == "Why they are hooked, in two lines."


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("known", "(self, x)", r"takes \(self, x, y=1\) instead of \(self, x\)"),
        ("known", ("y", "z"), "no longer takes z"),
        ("gone", "(self)", "is gone"),
        ("value", "(self)", "became a property"),
        ("known", None, "no longer a property"),
    ],
)
def test_changed_function_blocks_installation(name, signature, says):
    keras = make()
    good = FunctionPatch(keras, "known", "(self, x, y=1)", lambda original, self, x: 0)
    bad = FunctionPatch(keras, name, signature, lambda original, *args: 0)
    with pytest.raises(KerasVersionError, match=says):
        install([good, bad])
    assert keras().known(1) == 2


def test_refusal_names_change_place_and_fix():
    with pytest.raises(KerasVersionError) as error:
        FunctionPatch(make(), "gone", "(self)", lambda original: 0).check()
    version = re.escape(installed_keras.__version__)
    assert re.fullmatch(
        rf"Keras {version} changed a function .*Keras\.gone` is gone\. "
        r"Please upgrade keras_strategy, or install a Keras version that it supports\.",
        str(error.value),
    )


@pytest.fixture
def modules(monkeypatch):
    """Two homes: `home_before` has f and g, `home_now` has g and h."""
    for name, has in (("home_before", "fg"), ("home_now", "gh")):
        module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(has, name))
        monkeypatch.setitem(sys.modules, name, module)
    return "home_before", "home_now"


@pytest.mark.parametrize(
    ("names", "home"),
    [("f g", "home_before"), ("g", "home_before"), ("g h", "home_now")],
)
def test_module_is_found_by_its_names(names, home, modules):
    assert find_module(names, "never.was.there", *modules).__name__ == home


def test_missing_name_is_refused(modules):
    homes = r"it is not in home_before or home_now or never\.was"
    with pytest.raises(KerasVersionError, match=rf"`home_before\.f` is gone: {homes}"):
        find_module("f h", *modules, "never.was")


def test_broken_import_is_not_a_moved_module(tmp_path, monkeypatch):
    (tmp_path / "home_broken.py").write_text("import not_installed_here")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        find_module("f", "home_broken")
