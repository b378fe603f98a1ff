"""A Keras that changed is refused, as a whole."""

import re
import sys
import types

import keras as installed_keras
import pytest

from keras_strategy.errors import KerasVersionError
from keras_strategy.hooks.hook import Hook, home_of, install


def make():
    class Keras:
        def known(self, x, y: int = 1):
            return x + y

        @property
        def value(self):
            return 3

    return Keras


def test_a_function_that_is_as_known_is_replaced():
    keras = make()
    hook = Hook(
        keras, "known", "(self, x, y=1)", lambda o: lambda self, x: o(self, x) * 10
    )
    install([hook])
    assert keras().known(1) == 20


def test_a_hook_may_rely_on_some_parameters_alone():
    keras = make()
    install([Hook(keras, "known", ("y",), lambda o: lambda self, *a: 7)])
    assert keras().known(1) == 7


def test_a_property_is_replaced():
    keras = make()

    def replace(original):
        return property(lambda self: original.fget(self) + 1)

    install([Hook(keras, "value", None, replace)])
    assert keras().value == 4


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("known", "(self, x)", r"takes \(self, x, y=1\), where \(self, x\) is known"),
        ("known", ("y", "z"), "no longer takes z"),
        ("gone", "(self)", "is gone"),
        ("value", "(self)", "became a property"),
        ("known", None, "no longer a property"),
    ],
)
def test_a_changed_function_is_refused_and_nothing_is_installed(name, signature, says):
    keras = make()
    good = Hook(keras, "known", "(self, x, y=1)", lambda o: lambda self, x: 0)
    bad = Hook(keras, name, signature, lambda o: o)
    with pytest.raises(KerasVersionError, match=says):
        install([good, bad])
    assert keras().known(1) == 2


def test_a_refusal_says_what_changed_where_and_what_to_do():
    with pytest.raises(KerasVersionError) as error:
        Hook(make(), "gone", "(self)", lambda o: o).check()
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
def test_a_module_is_known_by_what_it_provides(names, home, modules):
    assert home_of(names, "never.was.there", *modules).__name__ == home


def test_a_name_without_a_home_is_refused(modules):
    homes = r"it is not in home_before or home_now or never\.was"
    with pytest.raises(KerasVersionError, match=rf"`home_before\.f` is gone: {homes}"):
        home_of("f h", *modules, "never.was")


def test_a_module_that_lacks_an_import_of_its_own_is_no_moved_one(
    tmp_path, monkeypatch
):
    (tmp_path / "home_broken.py").write_text("import not_installed_here")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        home_of("f", "home_broken")
