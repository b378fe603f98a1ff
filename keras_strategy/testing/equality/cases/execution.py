"""How Keras executes steps."""

from collections.abc import Iterator

from keras_strategy.testing.equality import models
from keras_strategy.testing.equality.cases.case import Case
from keras_strategy.testing.equality.models import compiled


def cases() -> Iterator[Case]:
    """How Keras executes steps."""
    one_step = {"torch": "Keras has steps_per_execution=1 there"}
    yield Case(
        "steps_per_execution=3",
        lambda: compiled(steps_per_execution=3),
        not_on=one_step,
    )
    yield Case("run_eagerly", lambda: compiled(run_eagerly=True))
    yield Case(
        "jit_compile=True",
        lambda: compiled(jit_compile=True),
        not_on={"torch": "torch.compile is for one replica a process"},
    )
    yield Case("jit_compile=False", lambda: compiled(jit_compile=False))
    yield Case("shuffle", compiled, fit=lambda rows: {"shuffle": True})
    yield Case(
        "validation_data",
        compiled,
        fit=lambda rows: {"validation_data": models.regression(11)},
    )
