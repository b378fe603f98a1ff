"""A Keras that changed is refused, as a whole."""

import pytest

from keras_strategy import hooking
from keras_strategy.errors import KerasVersionError
from keras_strategy.hooking import Hook


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
    hooking.install([hook])
    assert keras().known(1) == 20


def test_a_hook_may_rely_on_some_parameters_alone():
    keras = make()
    hooking.install([Hook(keras, "known", ("y",), lambda o: lambda self, *a: 7)])
    assert keras().known(1) == 7


def test_a_property_is_replaced():
    keras = make()

    def replace(original):
        return property(lambda self: original.fget(self) + 1)

    hooking.install([Hook(keras, "value", None, replace)])
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
        hooking.install([good, bad])
    assert keras().known(1) == 2
