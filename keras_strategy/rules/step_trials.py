"""Whether what a user's `train_step` comes to is a mean over rows.

What a replica gives to `optimizer.apply` is added up, weighted by rows; so are the
numbers that it returns beside the results of metrics. That is what one device gives
where these are means over rows. They are not where the step adds rows up, compares them
with each other, or clips gradients before it applies them. So the step is called on a
few rows and on the halves of them, and what it comes to is compared, which changes
nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

from keras import ops, tree

from keras_strategy.core.random_states import random_states_kept
from keras_strategy.core.registry import get_engine
from keras_strategy.rules.trials import (
    Unchanging,
    has_rows,
    holds,
)

# More rows tell no more, and take memory.
_ROWS = 8
# Relative to the largest entry of a gradient, and of all of them.
_ROUNDING, _OF_ALL = 1e-2, 1e-3
_HALF = ("float16", "bfloat16")


def adds_up(model: Any, data: Any, layers: Sequence[Any]) -> Any:
    """Whether what a model's `train_step` comes to is a mean; True if nobody can tell.

    Args:
        model: The model.
        data: The replica's rows of a batch.
        layers: The model's layers.
    """
    if any(layer.compute_dtype in _HALF for layer in layers):
        return True  # rounding tells nothing
    some = tree.map_structure(lambda x: x[:_ROWS] if has_rows(x) else x, data)
    return holds(_adds_up, some, model, layers)


def _adds_up(
    trial: Any, whole: Any, first: Any, second: Any, model: Any, layers: Sequence[Any]
) -> Any:
    """Whether what comes of some rows is the mean of what comes of their halves.

    Random numbers are other ones for fewer rows. A step that draws is told by as many
    rows each time: where no row depends on another, what AB and BA come to is what AA
    and BB come to.
    """
    outcome = functools.partial(_outcome, trial, model, layers)
    once, again = outcome(whole), outcome(whole)
    repeats = _alike(once, again)
    drew, known = trial.drew, get_engine().number(ops.cast(repeats, "int32"))
    if known == 0:  # it draws, and not by Keras
        drew = True
        with random_states_kept():
            once = outcome(whole)
        with random_states_kept():
            repeats = _alike(once, outcome(whole))
    found = []
    if drew:
        for parts in ((second, first), (first, first), (second, second)):
            rows = tree.map_structure(
                lambda a, b: ops.concatenate([a, b]) if has_rows(a) else a, *parts
            )
            with random_states_kept():
                found.append(outcome(rows))
        other, *parts = found
    else:
        trial.share, other = 0.5, once
        parts = [outcome(rows) for rows in (first, second)]
    trial.drew = False
    same = _alike(_sums(once, other), _sums(*parts))
    return ops.logical_or(same, ops.logical_not(repeats))


def _outcome(
    trial: Any, model: Any, layers: Sequence[Any], rows: Any
) -> tuple[list[Any], list[Any]]:
    """The gradients that a step applies, and what it returns; nothing changes.

    The results of metrics are those of no rows then.
    """
    trial.gradients, logs = [], None
    variables = model.trainable_variables
    with (
        get_engine().copies_to_derive_by(variables, layers) as copies,
        Unchanging(state_mapping=copies),
    ):
        try:
            logs = model.train_step(rows)
        except Exception:
            # It may look for what applying has changed.
            if not trial.gradients:
                raise
    return _numbers(trial.gradients), _numbers(tree.flatten(logs))


def _numbers(values: Any) -> list[Any]:
    return [
        ops.cast(ops.reshape(ops.convert_to_tensor(x), (-1,)), "float32")
        for x in values
        if x is not None
    ]


def _sums(some: tuple, others: tuple) -> tuple:
    """What two outcomes come to."""
    return tuple(
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(some, others, strict=True)
    )


def _alike(some: tuple, others: tuple) -> Any:
    """Whether outcomes are equal but for rounding; so are those that overflow."""
    found = ops.convert_to_tensor(True)
    for numbers in zip(some, others, strict=True):
        pairs = [pair for pair in zip(*numbers, strict=True) if 0 not in pair[0].shape]
        if pairs:
            sizes = ops.stack([ops.max(ops.abs(a)) for a, _ in pairs])
            apart = ops.stack([ops.max(ops.abs(a - b)) for a, b in pairs])
            allowed = _ROUNDING * ops.maximum(sizes, _OF_ALL * ops.max(sizes))
            # Of what is not finite no comparison holds.
            found = ops.logical_and(found, ops.logical_not(ops.any(apart > allowed)))
    return found
