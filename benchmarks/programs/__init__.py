"""Programs that train a case, ours and those of peers.

Only `ours` imports `keras_strategy`. A function of these modules takes a case and
keyword arguments, and returns what trains it.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from benchmarks.cases import Case

# Trains for so many steps, and returns when the devices have finished them.
Train = Callable[[int], None]


class Fit:
    """`model.fit` of one epoch of so many steps, in a context that `scope` makes.

    One of several ranks passes its own rows alone.
    """

    def __init__(
        self,
        model: keras.Model,
        case: Case,
        rank: int = 0,
        ranks: int = 1,
        scope: Callable[[], AbstractContextManager] = contextlib.nullcontext,
        **arguments: Any,
    ) -> None:
        self.model, self._case, self._scope = model, case, scope
        self._rank, self._ranks, self._arguments = rank, ranks, arguments

    def __call__(self, steps: int) -> None:
        batch = self._case.batch
        x, y = (
            rows[self._rank :: self._ranks] for rows in self._case.rows(steps * batch)
        )
        size = batch // self._ranks
        with self._scope():
            self.model.fit(x, y, batch_size=size, verbose=0, **self._arguments)
