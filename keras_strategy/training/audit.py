"""Whether what a user wrote treats the rows of a batch as replicas need it.

A replica computes on its rows of a batch; what the replicas computed is joined row by
row, added up, or averaged. Whether that comes to what one device computes of the whole
batch cannot be read off a function. So it is tried: in the first step of a loop, what
is not Keras's own is called on the first replica's rows and on the two halves of them,
as on one device. Where the halves come to something else, a warning names the function
and says what to do. How a function is tried stands in `rules.trials`.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun
from keras_strategy.training import audit_checks
from keras_strategy.training.audit_checks import (
    GATHER,
    DiscardUpdates,
    all_true,
    check_rows,
    check_rows_if_possible,
    forgetting,
    has_rows,
    is_close,
    is_new,
    split_in_halves,
    value_of,
    warn_once,
)
from keras_strategy.training.variable_sync import is_sync_on_read, split_assigned_value

logger = logging.getLogger("keras_strategy")

# Relative to the largest entry, where rows are added up in another order.
_ROUNDING = 1e-3
# Where a row is computed twice, beside others, and as many of them.
_SAME = 1e-6

WarnUnless = Callable[[Callable[[], Any], Callable[[], None]], None]

# What is said of a user's, which is named in the braces.
_SAID = {
    "call": (
        "What {} gives for a row depends on the other rows of the batch. Several "
        "replicas compute it of their own rows each, which makes other numbers than "
        f"one device's. To compare all rows, gather them: {GATHER}."
    ),
    "compute_loss": (
        "What {} gives is no mean over the rows of a batch: of two halves the mean is "
        "another than of the whole. Several replicas compute it of their own rows "
        "each, and the mean of that is not one device's loss. Divide a sum by the "
        f"rows, `ops.shape(x)[0]`; to compare all rows, gather them: {GATHER}."
    ),
    "compute_metrics": (
        "A number that {} returns beside the results of metrics is no mean over the "
        "rows of a batch. What is logged of several replicas is the mean of theirs, "
        "which is not one device's. Log it with a metric, or gather the rows: "
        f"{GATHER}."
    ),
    "predict_step": (
        "What {} gives for a row depends on the other rows of the batch. Several "
        "replicas compute it of their own rows each, which makes other predictions "
        f"than one device's. Compare the rows of all replicas, {GATHER}, or what "
        "`predict` returned."
    ),
    "test_step": (
        "A number that {} returns beside the results of metrics, or gives to a metric, "
        "is no mean over the rows of a batch. Several replicas compute it of their own "
        "rows each, and the mean of that is not one device's. Give metrics a number "
        f"for each row, or gather the rows: {GATHER}."
    ),
    "train_step": (
        "What {} applies as gradients, assigns to weights, returns beside the results "
        "of metrics, or gives to a metric, is no mean over the rows of a batch. "
        "Several replicas compute it of their own rows each, and the mean of that is "
        "not one device's. Divide a sum by the rows, `ops.shape(x)[0]`; have the "
        "optimizer clip (`global_clipnorm`); give metrics a number for each row; to "
        f"compare all rows, gather them: {GATHER}."
    ),
}

_of_keras = {
    id(part)
    for public in (*vars(keras.losses).values(), *vars(keras.metrics).values())
    # With what Keras's classes inherit from.
    for part in (public.__mro__[:-1] if isinstance(public, type) else (public,))
}


def is_keras(loss_or_metric: Any) -> bool:
    """Whether a class or function is one of Keras's losses or metrics."""
    return id(loss_or_metric) in _of_keras


def has_no_external_state(layers: Iterable[Any]) -> bool:
    """Whether a call of these layers as on one device leaves nothing behind.

    What modules of torch's keep, a trial could not put back.
    """
    wrapper = keras.layers.TorchModuleWrapper
    return not any(isinstance(layer, wrapper) for layer in layers)


@dataclass
class RowAudit:
    """What a loop over batches tries in its first step.

    Attributes:
        model: The model.
        own: What of the model is a user's, as warnings call it; see `to_try`.
        training: Whether the loop trains.
        warn_unless: See `StepState.warn_unless`.
        active: Whether the first step is still to come.
    """

    model: Any
    own: Mapping[str, str]
    training: bool
    warn_unless: WarnUnless
    active: bool = True

    def warner_for(self, replica: Any) -> WarnUnless | None:
        """What the step of a replica warns with, if it is to try something."""
        return self.warn_unless if self.active and replica.index == 0 else None

    def audit_model(self, data: Any, layers: Sequence[Any]) -> None:
        """Tries what of the model is a user's.

        Args:
            data: The replica's rows of a batch.
            layers: The model's layers; a trial builds none of them.
        """
        if not self.own or not all(layer.built for layer in layers):
            return
        model = self.model
        checks: dict[str, Callable[[], Any]] = {
            "call": lambda: _keeps_rows_apart(model, data, self.training),
            "compute_loss": lambda: _loss_is_a_mean(model, data),
            "compute_metrics": lambda: check_rows(_means_of_logs, data, model),
            "predict_step": lambda: check_rows(_same_predictions, data, model),
            **{
                step: functools.partial(
                    audit_checks.step_is_mean_over_rows, model, step, data, layers
                )
                for step in ("train_step", "test_step")
            },
        }
        for what, check in checks.items():
            # In training a `call` may compute something else.
            twice = what == "call" and self.training
            once = "call in training" if twice else what
            if what in self.own and is_new(model, once):
                said = _SAID[what].format(self.own[what])
                self.warn_unless(check, warn_once(model, said))


def audit_loss(warn_unless: WarnUnless, loss: Any, y_true: Any, y_pred: Any) -> None:
    """Tries a loss that gives a number for each row.

    Args:
        warn_unless: See `StepState.warn_unless`.
        loss: The loss, none of Keras's.
        y_true: The targets of the replica's rows.
        y_pred: What the model made of the rows.
    """
    if not is_new(loss, "call"):
        return

    def same(trial: DryRun, *parts):
        return _same_rows(trial, lambda rows: loss.call(*rows), *parts)

    message = (
        f"What the loss '{loss.name}' gives for a row depends on the other rows of the "
        "batch. Several replicas compute it of their own rows each, which makes "
        "another loss than one device's. Give one number for the batch, such as the "
        "mean: a loss that gives one number is computed of all rows."
    )
    warn_unless(
        lambda: check_rows(same, (y_true, y_pred)),
        warn_once(loss, message),
    )


def audit_metric(
    warn_unless: WarnUnless, metric: Any, args: tuple, kwargs: dict
) -> None:
    """Tries a metric whose variables are added up over the replicas.

    Args:
        warn_unless: See `StepState.warn_unless`.
        metric: The metric.
        args: What its `update_state` is called with.
        kwargs: Likewise.
    """
    variables = metric.variables
    if not variables and is_new(metric, "no variables"):
        logger.warning(
            "The metric '%s' has no variables. What it keeps in Python is brought up "
            "to date by each replica with its own rows, one after the other, and by a "
            "replica that has none with a row that stands in: that is not what one "
            "device keeps. Keep it in variables, made with `add_variable`.",
            metric.name,
        )
    if not variables or not all(
        is_sync_on_read(v) and v.aggregation == "sum" for v in variables
    ):
        return  # what was written counts
    if not is_new(metric, "update_state"):
        return

    def adds_up(trial: DryRun, *rows):
        # On one device, and on two replicas.
        twin = object.__new__(type(metric))
        vars(twin).update(vars(metric))
        initial = [value_of(v) for v in twin.stateless_reset_state()]
        parts = [
            split_assigned_value(variable, value, 2)
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
                results.append([value_of(x) for x in tree.flatten(twin.result())])
        pairs = zip(results[0], results[1], strict=True)
        return all_true([is_close(a, b, _ROUNDING) for a, b in pairs])

    message = (
        f"The metric '{metric.name}' has another result for the rows of a batch than "
        "for two halves of them whose variables are added up. The variables of several "
        "replicas are added up, so the result is another than one device's. Let the "
        "variables hold sums over rows. For state that is no sum, make them with "
        'aggregation="only_first_replica" and have all replicas hold the same: '
        f"{GATHER} brings all rows."
    )
    warn_unless(
        lambda: check_rows(adds_up, (args, kwargs)),
        warn_once(metric, message),
    )


def _keeps_rows_apart(model: Any, data: Any, training: bool) -> Any:
    """Whether what a model gives for a row does not depend on other rows.

    Where that cannot be told of its training, it is told of what it does else.
    """
    found = (
        check_rows_if_possible(_same_outputs, data, model, True) if training else None
    )
    return check_rows(_same_outputs, data, model, False) if found is None else found


def _same_outputs(trial: DryRun, *parts: Any) -> Any:
    """Whether a model gives for some rows what it gives for them among others."""
    *rows, model, training = parts
    same = _same_rows(
        trial,
        functools.partial(model, training=training),
        *(keras.utils.unpack_x_y_sample_weight(part)[0] for part in rows),
    )
    trial.drew_random = False  # as many numbers each time, from the same seeds
    return same


def _same_rows(
    trial: DryRun, fn: Callable[[Any], Any], whole: Any, first: Any, second: Any
) -> Any:
    """Whether a function gives for rows the same where all others are other ones.

    And where they stand elsewhere in the batch, unless it draws: the numbers of a row
    are other ones there. If it does not for the very same rows either, it draws from an
    engine's generator.
    """
    rows = next(x for x in tree.flatten(whole) if has_rows(x)).shape[0]

    def made(given):
        return [
            x
            for x in tree.flatten(forgetting(fn, given))
            if has_rows(x) and x.shape[0] == rows
        ]

    def before(x):
        return x[: ops.shape(x)[0] // 2]

    def after(x):
        return x[ops.shape(x)[0] // 2 :]

    def twice(part):
        return tree.map_structure(
            lambda x: ops.concatenate([x, x]) if has_rows(x) else x, part
        )

    outputs, again = made(whole), made(whole)
    if not outputs:
        return True
    pairs = list(zip(outputs, made(twice(first)), made(twice(second)), strict=True))
    same = [is_close(before(a), before(b), _SAME) for a, b, _ in pairs]
    same += [is_close(after(a), after(b), _SAME) for a, _, b in pairs]
    if not trial.drew_random:
        same += [is_close(after(a), before(b), _ROUNDING) for a, _, b in pairs]
    repeats = [is_close(a, b, _SAME) for a, b in zip(outputs, again, strict=True)]
    return ops.logical_or(all_true(same), ops.logical_not(all_true(repeats)))


def _same_predictions(trial: DryRun, *parts: Any) -> Any:
    """Whether `predict_step` gives for some rows the same among others."""
    *rows, model = parts
    same = _same_rows(trial, model.predict_step, *rows)
    trial.drew_random = False  # as many numbers each time, from the same seeds
    return same


def _means_of_logs(trial: DryRun, *parts: Any) -> Any:
    """Whether what a model logs beside metrics is the mean of two halves'."""
    *rows, model = parts
    logs = []
    for x, y, y_pred, weight in _with_outputs(model, rows):
        with DiscardUpdates():
            found = model.compute_metrics(x, y, y_pred, weight)
        logs.append([ops.cast(x, "float32") for x in tree.flatten(found)])
    pairs = zip(*logs, strict=True)
    return all_true([is_close(a, (b + c) / 2, _ROUNDING) for a, b, c in pairs])


def _loss_is_a_mean(model: Any, data: Any) -> Any:
    """Whether a model's loss is a mean over rows, with the sample weights and without.

    Both are asked: with weights a loss of Keras's may divide by their sum over all
    rows, which tells nothing of what else is in it.
    """
    found = check_rows(_mean_of_rows, data, model, False)
    if keras.utils.unpack_x_y_sample_weight(data)[2] is None:
        return found
    return ops.logical_and(found, check_rows(_mean_of_rows, data, model, True))


def _mean_of_rows(trial: DryRun, *parts: Any) -> Any:
    """Whether a model's loss is the mean of the losses of two halves of the rows."""
    *rows, model, weighted = parts
    losses = []
    for x, y, y_pred, weight in _with_outputs(model, rows):
        trial.row_fraction = 0.5 if losses else 1.0
        given = {"x": x, "y": y, "y_pred": y_pred}
        given["sample_weight"] = weight if weighted else None
        losses.append(model.compute_loss(**given))
    return is_close(losses[0], (losses[1] + losses[2]) / 2, _ROUNDING)


def _with_outputs(model: Any, parts: Sequence[Any]) -> Iterator[tuple]:
    """Rows and the halves of them: inputs, targets, outputs and weights."""
    whole, *_ = parts
    outputs = split_in_halves(model(keras.utils.unpack_x_y_sample_weight(whole)[0]))[0]
    for rows, y_pred in zip(parts, outputs, strict=True):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
        yield x, y, y_pred, weight
