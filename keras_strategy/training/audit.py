"""Audit of user code: is it row-independent, or a mean over rows?

A replica computes on its local batch; the replicas' results are concatenated, summed,
or averaged. Whether that equals one device's result cannot be read off a function. So
it is measured: in the first step of a loop, user code is run on the first replica's
rows and on their two halves, as on one device. If the results differ, a warning names
the function and the fix. `audit_checks` runs the code without keeping its effects.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun
from keras_strategy.core.step_state import has_rows, map_rows
from keras_strategy.training import audit_checks
from keras_strategy.training.audit_checks import (
    GATHER,
    DiscardUpdates,
    all_true,
    call_without_effects,
    check_rows,
    check_rows_if_possible,
    is_close,
    is_new,
    split_in_halves,
    value_of,
    warn_once,
)
from keras_strategy.training.variable_sync import is_sync_on_read, split_assigned_value

logger = logging.getLogger("keras_strategy")

# Tolerances relative to the largest entry: for rows summed in another order, and for a
# row computed repeat, beside other rows of equal number.
_ROUNDING = 1e-3
_SAME = 1e-6

WarnUnless = Callable[[Callable[[], Any], Callable[[], None]], None]

_WARNINGS = {
    "call": (
        "The result of {} for a row depends on the other rows of the batch. Each "
        "replica computes it from its local rows, so it differs from one device's. To "
        f"compare all rows, gather them: {GATHER}."
    ),
    "compute_loss": (
        "The result of {} is not a mean over the rows of a batch: the mean of two "
        "halves differs from that of the batch. Each replica computes it from its "
        "local rows, and the mean differs from one device's loss. Divide a sum by the "
        "number of rows, `ops.shape(x)[0]`. To compare all rows, gather them: "
        f"{GATHER}."
    ),
    "compute_metrics": (
        "A number that {} returns besides the results of metrics is not a mean over "
        "the rows of a batch. The log is the mean of the replicas' numbers, which "
        "differs from one device's. Log it with a metric, or gather the rows: "
        f"{GATHER}."
    ),
    "predict_step": (
        "The result of {} for a row depends on the other rows of the batch. Each "
        "replica computes it from its local rows, so predictions differ from one "
        f"device's. Compare the rows of all replicas ({GATHER}), or the results of "
        "`predict`."
    ),
    "test_step": (
        "A number that {} returns besides the results of metrics, or passes to a "
        "metric, is not a mean over the rows of a batch. Each replica computes it from "
        "its local rows, and the mean differs from one device's. Pass metrics a number "
        f"for each row, or gather the rows: {GATHER}."
    ),
    "train_step": (
        "What {} applies as gradients, assigns to weights, returns besides the results "
        "of metrics, or passes to a metric, is not a mean over the rows of a batch. "
        "Each replica computes it from its local rows, and the mean differs from one "
        "device's. Divide a sum by the number of rows, `ops.shape(x)[0]`. Clip with "
        "the optimizer (`global_clipnorm`). Pass metrics a number for each row. To "
        f"compare all rows, gather them: {GATHER}."
    ),
}

_keras_parts = {
    id(part)
    for public in (*vars(keras.losses).values(), *vars(keras.metrics).values())
    # With base classes.
    for part in (public.__mro__[:-1] if isinstance(public, type) else (public,))
}


def is_keras(loss_or_metric: Any) -> bool:
    """Return True for one of Keras's losses or metrics."""
    return id(loss_or_metric) in _keras_parts


def has_no_external_state(layers: Iterable[Any]) -> bool:
    """Return True if a dry run of these layers leaves nothing behind.

    The state of torch modules cannot be restored.
    """
    wrapper = keras.layers.TorchModuleWrapper
    return not any(isinstance(layer, wrapper) for layer in layers)


@dataclass
class RowAudit:
    """Checks of user code in the first step of a loop.

    Attributes:
        model: The model.
        user_code: The user's methods by kind, as named in warnings.
        training: True if the loop trains.
        warn_unless: See `StepState.warn_unless`.
        active: True until the first step has run.
    """

    model: Any
    user_code: Mapping[str, str]
    training: bool
    warn_unless: WarnUnless
    active: bool = True

    def warner_for(self, replica: Any) -> WarnUnless | None:
        """Return the warning function of a replica's step, if it is audited."""
        return self.warn_unless if self.active and replica.index == 0 else None

    def audit_model(self, data: Any, layers: Sequence[Any]) -> None:
        """Check the user's methods of the model, once all layers are built."""
        if not self.user_code or not all(layer.built for layer in layers):
            return
        model = self.model
        checks: dict[str, Callable[[], Any]] = {
            "call": lambda: _is_row_independent(model, data, self.training),
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
            # `call` may compute something else in training.
            is_training_call = what == "call" and self.training
            name = "call in training" if is_training_call else what
            if what in self.user_code and is_new(model, name):
                message = _WARNINGS[what].format(self.user_code[what])
                self.warn_unless(check, warn_once(model, message))


def audit_loss(warn_unless: WarnUnless, loss: Any, y_true: Any, y_pred: Any) -> None:
    """Check a user's loss that returns a number for each row."""
    if not is_new(loss, "call"):
        return

    def same(dry_run: DryRun, *parts):
        return _same_rows(dry_run, lambda rows: loss.call(*rows), *parts)

    message = (
        f"The result of the loss '{loss.name}' for a row depends on the other rows of "
        "the batch. Each replica computes it from its local rows, so it differs from "
        "one device's. Return one number for the batch, such as the mean: a loss that "
        "returns one number is computed from all rows."
    )
    warn_unless(
        lambda: check_rows(same, (y_true, y_pred)),
        warn_once(loss, message),
    )


def audit_metric(
    warn_unless: WarnUnless, metric: Any, args: tuple, kwargs: dict
) -> None:
    """Check a user's metric whose variables are summed over the replicas."""
    variables = metric.variables
    if not variables and is_new(metric, "no variables"):
        logger.warning(
            "The metric '%s' has no variables. Each replica updates its Python state "
            "with its local rows, one after the other, and a replica without rows with "
            "a placeholder row, so it differs from one device's. Keep state in "
            "variables, which you create with `add_variable`.",
            metric.name,
        )
    if not variables or not all(
        is_sync_on_read(v) and v.aggregation == "sum" for v in variables
    ):
        return  # the user's choice
    if not is_new(metric, "update_state"):
        return

    def adds_up(dry_run: DryRun, *rows):
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
            values = list(zip(variables, state, strict=True))
            with keras.StatelessScope(state_mapping=values):
                results.append([value_of(x) for x in tree.flatten(twin.result())])
        pairs = zip(results[0], results[1], strict=True)
        return all_true([is_close(a, b, _ROUNDING) for a, b in pairs])

    message = (
        f"The metric '{metric.name}' has different results for the rows of a batch and "
        "for two halves of them whose variables are summed. The variables of several "
        "replicas are summed, so the result differs from one device's. Use variables "
        "for sums over rows. For other state, create them with "
        'aggregation="only_first_replica" and assign equal values on all replicas: '
        f"{GATHER} gathers all rows."
    )
    warn_unless(
        lambda: check_rows(adds_up, (args, kwargs)),
        warn_once(metric, message),
    )


def _is_row_independent(model: Any, data: Any, training: bool) -> Any:
    """Return True if a model is row-independent, in training if possible."""
    found = (
        check_rows_if_possible(_same_outputs, data, model, True) if training else None
    )
    return check_rows(_same_outputs, data, model, False) if found is None else found


def _same_outputs(dry_run: DryRun, *parts: Any) -> Any:
    """Return True if a model is row-independent."""
    *rows, model, training = parts
    same = _same_rows(
        dry_run,
        functools.partial(model, training=training),
        *(keras.utils.unpack_x_y_sample_weight(part)[0] for part in rows),
    )
    dry_run.drew_random = False  # as many numbers each time, from the same seeds
    return same


def _same_rows(
    dry_run: DryRun, fn: Callable[[Any], Any], batch: Any, first: Any, second: Any
) -> Any:
    """Return True if a function is row-independent.

    The results of rows beside other rows must be equal, also at other positions unless
    the function draws random numbers. A function that differs for equal rows draws
    without Keras, and passes.
    """
    rows = next(x for x in tree.flatten(batch) if has_rows(x)).shape[0]

    def row_outputs(arguments):
        return [
            x
            for x in tree.flatten(call_without_effects(fn, arguments))
            if has_rows(x) and x.shape[0] == rows
        ]

    def before(x):
        return x[: ops.shape(x)[0] // 2]

    def after(x):
        return x[ops.shape(x)[0] // 2 :]

    def repeat(part):
        return map_rows(lambda x: ops.concatenate([x, x]), part)

    outputs, repeated = row_outputs(batch), row_outputs(batch)
    if not outputs:
        return True
    pairs = list(
        zip(
            outputs,
            row_outputs(repeat(first)),
            row_outputs(repeat(second)),
            strict=True,
        )
    )
    same = [is_close(before(a), before(b), _SAME) for a, b, _ in pairs]
    same += [is_close(after(a), after(b), _SAME) for a, _, b in pairs]
    if not dry_run.drew_random:
        same += [is_close(after(a), before(b), _ROUNDING) for a, _, b in pairs]
    repeats = [is_close(a, b, _SAME) for a, b in zip(outputs, repeated, strict=True)]
    return ops.logical_or(all_true(same), ops.logical_not(all_true(repeats)))


def _same_predictions(dry_run: DryRun, *parts: Any) -> Any:
    """Return True if `predict_step` is row-independent."""
    *rows, model = parts
    same = _same_rows(dry_run, model.predict_step, *rows)
    dry_run.drew_random = False  # as many numbers each time, from the same seeds
    return same


def _means_of_logs(dry_run: DryRun, *parts: Any) -> Any:
    """Return True if the logs besides metrics are means over rows."""
    *rows, model = parts
    logs = []
    for x, y, y_pred, weight in _with_outputs(model, rows):
        with DiscardUpdates():
            found = model.compute_metrics(x, y, y_pred, weight)
        logs.append([ops.cast(x, "float32") for x in tree.flatten(found)])
    pairs = zip(*logs, strict=True)
    return all_true([is_close(a, (b + c) / 2, _ROUNDING) for a, b, c in pairs])


def _loss_is_a_mean(model: Any, data: Any) -> Any:
    """Return True if a model's loss is a mean over rows.

    It is checked with and without sample weights: with weights, Keras's losses may
    divide by their sum over all rows, which hides other terms.
    """
    found = check_rows(_mean_of_rows, data, model, False)
    if keras.utils.unpack_x_y_sample_weight(data)[2] is None:
        return found
    return ops.logical_and(found, check_rows(_mean_of_rows, data, model, True))


def _mean_of_rows(dry_run: DryRun, *parts: Any) -> Any:
    """Return True if a model's loss is the mean of the losses of two halves."""
    *rows, model, weighted = parts
    losses = []
    for x, y, y_pred, weight in _with_outputs(model, rows):
        dry_run.row_fraction = 0.5 if losses else 1.0
        arguments = {"x": x, "y": y, "y_pred": y_pred}
        arguments["sample_weight"] = weight if weighted else None
        losses.append(model.compute_loss(**arguments))
    return is_close(losses[0], (losses[1] + losses[2]) / 2, _ROUNDING)


def _with_outputs(model: Any, parts: Sequence[Any]) -> Iterator[tuple]:
    """Yield inputs, targets, outputs and weights of the rows and their halves."""
    batch, *_ = parts
    outputs = split_in_halves(model(keras.utils.unpack_x_y_sample_weight(batch)[0]))[0]
    for rows, y_pred in zip(parts, outputs, strict=True):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(rows)
        yield x, y, y_pred, weight
