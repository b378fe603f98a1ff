"""Ways in which Keras executes steps."""

from collections.abc import Iterator

import keras

from conformance import models
from conformance.equality.cases.case import Case
from conformance.models import compiled
from keras_strategy.core.context import has_strategy


def cases() -> Iterator[Case]:
    """Yield ways in which Keras executes steps."""
    yield Case(
        "steps_per_execution=3",
        lambda: compiled(steps_per_execution=3),
        not_on=_one_step(),
    )
    yield Case("run_eagerly", lambda: compiled(run_eagerly=True))
    yield Case("jit_compile=True", lambda: compiled(jit_compile=_is_compiled()))
    yield Case("jit_compile=False", lambda: compiled(jit_compile=False))
    yield Case("shuffle", compiled, fit=lambda rows: {"shuffle": True})
    yield Case(
        "validation_data",
        compiled,
        fit=lambda rows: {"validation_data": models.regression(11)},
    )


def _is_compiled() -> bool:
    """Return False on torch's one device, where Keras compiles for half a minute."""
    return keras.backend.backend() != "torch" or has_strategy()


def _one_step() -> dict[str, str]:
    """Return the backends on which this Keras refuses `steps_per_execution`."""
    try:
        compiled(steps_per_execution=3).make_train_function()
    except ValueError:
        name = keras.backend.backend()
        return {name: "Keras has steps_per_execution=1 there"}
    return {}
