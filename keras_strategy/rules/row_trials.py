"""Whether what a user wrote treats the rows of a batch as replicas need it.

A replica computes on its rows of a batch; what the replicas computed is joined row by
row, added up, or averaged. Whether that comes to what one device computes of the whole
batch cannot be read off a function. So it is tried: in the first step of a loop, what
is not Keras's own is called on the first replica's rows and on the two halves of them,
as on one device. Where the halves come to something else, a warning names the function
and says what to do. What a trial assigns and draws is forgotten. A function that asks
for its replica knows of the others, and what draws numbers that Keras's seeds do not
decide cannot be compared: neither is judged.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import as_on_one_device
from keras_strategy.core.own_attributes import set_for_nobody
from keras_strategy.core.random_states import random_states_kept
from keras_strategy.rules.aggregation import is_on_read, parts_outside

logger = logging.getLogger("keras_strategy")

# Relative to the largest entry, where rows are added up in another order.
_ROUNDING = 1e-3
# Where a row is computed twice, beside others, and as many of them.
_SAME = 1e-6
# Of what is smaller than this, all is rounding.
_SMALL = 1e-2

WarnUnless = Callable[[Callable[[], Any], Callable[[], None]], None]

_of_keras = {
    id(part)
    for public in (*vars(keras.losses).values(), *vars(keras.metrics).values())
    # With what Keras's classes inherit from.
    for part in (public.__mro__[:-1] if isinstance(public, type) else (public,))
}
# What was tried of each object.
_tried: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_GATHER = "`ks.get_replica_context().all_gather(x, axis=0)`"


def is_keras(loss_or_metric: Any) -> bool:
    """Whether a class or function is one of Keras's losses or metrics."""
    return id(loss_or_metric) in _of_keras


def keeps_nothing_else(layers: Iterable[Any]) -> bool:
    """Whether a call of these layers as on one device leaves nothing behind.

    What modules of torch's keep, a trial could not put back.
    """
    wrapper = keras.layers.TorchModuleWrapper
    return not any(isinstance(layer, wrapper) for layer in layers)


@dataclass
class RowTrials:
    """What a loop over batches tries in its first step.

    Attributes:
        model: The model.
        own: What of the model is a user's, as warnings call it, by "call" and
            "compute_loss".
        training: Whether the loop trains.
        warn_unless: See `StepState.warn_unless`.
        active: Whether the first step is still to come.
    """

    model: Any
    own: Mapping[str, str]
    training: bool
    warn_unless: WarnUnless
    active: bool = True

    def of(self, replica: Any) -> WarnUnless | None:
        """What the step of a replica warns with, if it is to try something."""
        return self.warn_unless if self.active and replica.index == 0 else None

    def of_model(self, data: Any, layers: Iterable[Any]) -> None:
        """Tries what of the model is a user's.

        Args:
            data: The replica's rows of a batch.
            layers: The model's layers; a trial builds none of them.
        """
        if not self.own or not all(layer.built for layer in layers):
            return
        own = self.own
        kind = "call in training" if self.training else "call"
        if "call" in own and _is_new(self.model, kind):
            message = (
                f"What {own['call']} gives for a row depends on the other rows of the "
                "batch. Several replicas compute it of their own rows each, which "
                "makes other numbers than one device's. To compare all rows, gather "
                f"them: {_GATHER}."
            )
            self.warn_unless(
                lambda: _keeps_rows_apart(self.model, data, self.training),
                _warning(self.model, message),
            )
        if "compute_loss" in own and _is_new(self.model, "compute_loss"):
            message = (
                f"What {own['compute_loss']} gives is no mean over the rows of a "
                "batch: of two halves the mean is another than of the whole. Several "
                "replicas compute it of their own rows each, and the mean of that is "
                "not one device's loss. Divide a sum by the rows, `ops.shape(x)[0]`; "
                f"to compare all rows, gather them: {_GATHER}."
            )
            self.warn_unless(
                lambda: _holds(_mean_of_rows, data, self.model),
                _warning(self.model, message),
            )


def of_loss(warn_unless: WarnUnless, loss: Any, y_true: Any, y_pred: Any) -> None:
    """Tries a loss that gives a number for each row.

    Args:
        warn_unless: See `StepState.warn_unless`.
        loss: The loss, none of Keras's.
        y_true: The targets of the replica's rows.
        y_pred: What the model made of the rows.
    """
    if not _is_new(loss, "call"):
        return

    def same(trial, whole, first, _):
        return _same_rows(lambda rows: loss.call(*rows), whole, first)

    message = (
        f"What the loss '{loss.name}' gives for a row depends on the other rows of the "
        "batch. Several replicas compute it of their own rows each, which makes "
        "another loss than one device's. Give one number for the batch, such as the "
        "mean: a loss that gives one number is computed of all rows."
    )
    warn_unless(
        lambda: _holds(same, (y_true, y_pred)),
        _warning(loss, message),
    )


def of_metric(warn_unless: WarnUnless, metric: Any, args: tuple, kwargs: dict) -> None:
    """Tries a metric whose variables are added up over the replicas.

    Args:
        warn_unless: See `StepState.warn_unless`.
        metric: The metric.
        args: What its `update_state` is called with.
        kwargs: Likewise.
    """
    variables = metric.variables
    if not variables or not all(
        is_on_read(v) and v.aggregation == "sum" for v in variables
    ):
        return  # what was written counts
    if not _is_new(metric, "update_state"):
        return

    def adds_up(trial, *rows):
        # On one device, and on two replicas.
        twin = object.__new__(type(metric))
        vars(twin).update(vars(metric))
        initial = [_value(v) for v in twin.stateless_reset_state()]
        parts = [
            parts_outside(variable, value, 2)
            for variable, value in zip(variables, initial, strict=True)
        ]
        before = [initial, *zip(*parts, strict=True)]
        one, *two = [
            twin.stateless_update_state(list(state), *args, **kwargs)
            for state, (args, kwargs) in zip(before, rows, strict=True)
        ]
        joined = [ops.add(*halves) for halves in zip(*two, strict=True)]
        results = []
        for state in (one, joined):
            held = list(zip(variables, state, strict=True))
            with keras.StatelessScope(state_mapping=held):
                results.append([_value(x) for x in tree.flatten(twin.result())])
        pairs = zip(results[0], results[1], strict=True)
        return _all([_close(a, b, _ROUNDING) for a, b in pairs])

    message = (
        f"The metric '{metric.name}' has another result for the rows of a batch than "
        "for two halves of them whose variables are added up. The variables of several "
        "replicas are added up, so the result is another than one device's. Let the "
        "variables hold sums over rows. For state that is no sum, make them with "
        'aggregation="only_first_replica" and have all replicas hold the same: '
        f"{_GATHER} brings all rows."
    )
    warn_unless(
        lambda: _holds(adds_up, (args, kwargs)),
        _warning(metric, message),
    )


def _warning(tried: Any, message: str) -> Callable[[], None]:
    """Warns once of an object, which may be tried in training and else."""
    of = weakref.ref(tried)

    def warn():
        if (found := of()) is not None and _is_new(found, message):
            logger.warning(message)

    return warn


def _is_new(tried: Any, name: str) -> bool:
    """Whether something is to be tried, or said, which it is once."""
    names = _tried.setdefault(tried, set())
    if name in names:
        return False
    names.add(name)
    return True


def _keeps_rows_apart(model: Any, data: Any, training: bool) -> Any:
    """Whether what a model gives for a row does not depend on other rows.

    Where that cannot be told of its training, it is told of what it does else.
    """
    found = _told(_same_outputs, data, model, True) if training else None
    return _holds(_same_outputs, data, model, False) if found is None else found


def _holds(check: Callable[..., Any], structure: Any, *args: Any) -> Any:
    """Whether something holds; True where that cannot be told. See `_told`."""
    found = _told(check, structure, *args)
    return True if found is None else found


def _told(check: Callable[..., Any], structure: Any, *args: Any) -> Any:
    """Whether something holds; None where that cannot be told.

    Args:
        check: Called with the trial, with some rows, with the first and the second
            half of them, and with `args`.
        structure: Of tensors with the replica's rows.
        args: See `check`.

    Returns:
        A boolean, or a scalar tensor.
    """
    parts, enough = _halves(structure)
    if not parts:
        return None
    try:
        with (
            random_states_kept(),
            as_on_one_device() as trial,
            set_for_nobody(),
            keras.StatelessScope(),
        ):
            trial.of_rows = True
            found = check(trial, *parts, *args)
    except Exception:
        # Some functions take a batch of a certain size alone, or make a variable.
        logger.debug("No trial of a function by rows.", exc_info=True)
        return None
    if trial.knows or trial.drew:
        return None
    return ops.logical_or(found, ops.logical_not(enough))


def _halves(structure: Any) -> tuple[list[Any], Any]:
    """Some rows of a structure, the first and the second half of them.

    Returns:
        The three structures, none if there are no rows to divide; and whether there
        are enough of them, a scalar tensor where that is not known.
    """
    leaves = [x for x in tree.flatten(structure) if _has_rows(x)]
    if len({x.shape[0] for x in leaves}) != 1:
        return [], False
    rows = ops.shape(leaves[0])[0]
    if isinstance(rows, int):
        half, second, enough = rows // 2, rows // 2, rows >= 2
        if not enough:
            return [], False
    else:
        half, enough = ops.maximum(rows // 2, 1), rows >= 2
        second = ops.minimum(half, rows - 1)

    def part(begin, end):
        return tree.map_structure(
            lambda x: x[begin:end] if _has_rows(x) else x, structure
        )

    return [part(0, second + half), part(0, half), part(second, second + half)], enough


def _same_outputs(
    trial: Any, whole: Any, first: Any, _: Any, model: Any, training: bool
) -> Any:
    """Whether a model gives for some rows what it gives for them among others."""
    same = _same_rows(
        functools.partial(model, training=training),
        *(keras.utils.unpack_x_y_sample_weight(rows)[0] for rows in (whole, first)),
    )
    trial.drew = False  # as many numbers each time, from the same seeds
    return same


def _same_rows(fn: Callable[[Any], Any], whole: Any, first: Any) -> Any:
    """Whether a function gives for rows the same where all others are other ones.

    If it does not for the very same ones either, it draws from an engine's generator.
    """
    twice = tree.map_structure(
        lambda x: ops.concatenate([x, x]) if _has_rows(x) else x, first
    )
    rows = next(x for x in tree.flatten(whole) if _has_rows(x)).shape[0]
    outputs, again, others = (
        [
            x[: ops.shape(x)[0] // 2]
            for x in tree.flatten(_forgetting(fn, given))
            if _has_rows(x) and x.shape[0] == rows
        ]
        for given in (whole, whole, twice)
    )
    if not outputs:
        return True
    same, repeats = (
        _all([_close(a, b, _SAME) for a, b in zip(outputs, found, strict=True)])
        for found in (others, again)
    )
    return ops.logical_or(same, ops.logical_not(repeats))


def _forgetting(fn: Callable[[Any], Any], rows: Any) -> Any:
    """What a function gives; the next call begins with the same seeds as this one."""
    with keras.StatelessScope():
        return fn(rows)


def _mean_of_rows(trial: Any, whole: Any, first: Any, second: Any, model: Any) -> Any:
    """Whether a model's loss is the mean of the losses of two halves of the rows."""
    outputs = _halves(model(keras.utils.unpack_x_y_sample_weight(whole)[0]))[0]
    losses = []
    for rows, y_pred in zip((whole, first, second), outputs, strict=True):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(rows)
        trial.share = 0.5 if losses else 1.0
        losses.append(model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=None))
    return _close(losses[0], (losses[1] + losses[2]) / 2, _ROUNDING)


def _has_rows(x: Any) -> bool:
    return len(getattr(x, "shape", ())) > 0


def _close(a: Any, b: Any, tolerance: float) -> Any:
    """Whether two tensors are equal, relative to the largest entry."""
    a, b = (ops.cast(ops.convert_to_tensor(x), "float32") for x in (a, b))
    size = ops.max(ops.where(ops.isfinite(a), ops.abs(a), 0.0), initial=0)
    same = ops.logical_or(ops.equal(a, b), ops.logical_and(ops.isnan(a), ops.isnan(b)))
    near = ops.abs(a - b) <= tolerance * ops.maximum(size, _SMALL)
    return ops.all(ops.logical_or(same, near))


def _value(x: Any) -> Any:
    """What a variable holds here; any other value as a tensor."""
    return x.value if isinstance(x, keras.Variable) else ops.convert_to_tensor(x)


def _all(found: list[Any]) -> Any:
    return ops.all(ops.stack([ops.convert_to_tensor(x) for x in found]))
