"""`fit`, as both sides call it; nothing here imports `keras_strategy`."""

from collections.abc import Callable

import keras

from benchmarks.cases import Case

# Trains for so many steps, and returns when the devices have finished them.
Train = Callable[[int], None]


def fit(model: keras.Model, case: Case) -> Train:
    """`model.fit` of one epoch of so many steps."""

    def train(steps: int) -> None:
        x, y = case.rows(steps * case.batch)
        model.fit(x, y, batch_size=case.batch, verbose=0)

    return train


def plain_fit(case: Case, jit_compile: bool | str = "auto") -> Train:
    """Keras as it is, on one device."""
    keras.utils.set_random_seed(0)
    return fit(case.compiled(jit_compile=jit_compile), case)


def plain_compiled_fit(case: Case) -> Train:
    return plain_fit(case, jit_compile=True)
