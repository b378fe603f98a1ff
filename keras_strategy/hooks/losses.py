"""Where Keras's losses are extended on every backend."""

from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun
from keras_strategy.hooks.conditions import (
    in_distributed_scope,
    in_replica_or_dry_run,
    in_step,
)
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.rules import losses, row_trials

keras_losses = home_of("apply_mask reduce_weighted_values", "keras.src.losses.loss")
keras_masking = home_of(
    "get_keras_mask set_keras_mask", "keras.src.backend.common.masking"
)
keras_compiled = home_of("get_loss", "keras.src.trainers.compile_utils")


@hook(
    keras.losses.Loss,
    "__call__",
    "(self, y_true, y_pred, sample_weight=None)",
    when=in_replica_or_dry_run,
)
def _call(original, replica, self, y_true, y_pred, sample_weight=None):
    """A replica's loss has the denominator of all rows.

    A loss that gives one number is computed on all rows: what it does with them is not
    known. Dice divides sums over all of them, and of the replicas' numbers no mean
    would be what one device computes. So is Circle, the one loss of Keras's that
    compares rows and gives a number for each.
    """
    if isinstance(replica, DryRun):
        return _tried(replica, original, self, y_true, y_pred, sample_weight)
    step = replica.step
    if step.has_all_rows:
        return original(self, y_true, y_pred, sample_weight)
    if step.row_weight is not None and _is_circle(self):
        return _on_all_rows(replica, original, self, y_true, y_pred, sample_weight)
    mask = keras_masking.get_keras_mask(y_pred)
    # As Keras does it, up to where it reduces what the loss gave for each entry.
    with keras.name_scope(self.name):
        true, pred = tree.map_structure(
            lambda x: ops.convert_to_tensor(x, dtype=self.dtype), (y_true, y_pred)
        )
        values = self.call(true, pred)
        if len(ops.shape(values)) > 0 or step.row_weight is None:
            if step.warn_unless is not None and _is_own(self):
                row_trials.audit_loss(step.warn_unless, self, true, pred)
            given = [mask, keras_masking.get_keras_mask(values)]
            return _reduced(self, replica, values, sample_weight, given)
    return _on_all_rows(replica, original, self, y_true, y_pred, sample_weight)


def _tried(trial, original, loss, y_true, y_pred, sample_weight):
    """The loss of some rows, as a replica would compute it."""
    given = tree.map_structure(ops.convert_to_tensor, (y_true, y_pred))
    if _is_circle(loss) or len(ops.shape(loss.call(*given))) == 0:
        trial.depends_on_replicas = True  # it is computed of all rows
    masked = keras_masking.get_keras_mask(y_pred) is not None
    weighted = sample_weight is not None and loss.reduction == "mean_with_sample_weight"
    if weighted or (masked and loss.reduction != "sum"):
        trial.depends_on_replicas = True  # it is divided by what all rows come to
    value = original(loss, y_true, y_pred, sample_weight)
    return value / trial.row_fraction if loss.reduction == "sum" else value


def _is_circle(loss: keras.losses.Loss) -> bool:
    return vars(loss).get("fn") is keras.losses.circle


def _is_own(loss: keras.losses.Loss) -> bool:
    """Whether a user wrote what gives a loss's numbers."""
    function = vars(loss).get("fn", type(loss))
    return not (row_trials.is_keras(function) and row_trials.is_keras(type(loss)))


@hook(
    keras_compiled,
    "get_loss",
    "(identifier, y_true, y_pred)",
    when=in_distributed_scope,
)
def _get_loss(original, strategy, identifier, y_true, y_pred):
    """A loss with a `__call__` of its own is computed on all rows, in a step.

    How it brings its rows together is not known.
    """
    loss = original(identifier, y_true, y_pred)
    if loss is None or type(loss).__call__ is keras.losses.Loss.__call__:
        return loss
    return _OnAllRows(loss)


class _OnAllRows:
    """A compiled loss that is called with the rows of all replicas."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss
        self.name = loss.name

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        replica, given = in_step(), (y_true, y_pred, sample_weight)
        if replica is None or replica.step.has_all_rows:
            return self.loss(*given)
        return _on_all_rows(replica, type(self.loss).__call__, self.loss, *given)


def _on_all_rows(replica, call, loss, y_true, y_pred, sample_weight):
    """What a loss's `__call__` makes of the rows of all replicas."""
    mask = keras_masking.get_keras_mask(y_pred)
    y_true, y_pred, sample_weight, mask = losses.gather_global_batch(
        replica, (y_true, y_pred, sample_weight, mask)
    )
    if mask is not None:
        keras_masking.set_keras_mask(y_pred, mask)
    replica.step.has_all_rows = True
    try:
        return call(loss, y_true, y_pred, sample_weight)
    finally:
        replica.step.has_all_rows = False


def _reduced(loss, replica, values, sample_weight, masks):
    """Keras's `reduce_weighted_values`, for one replica of many."""
    values = ops.convert_to_tensor(values, dtype=loss.dtype)
    present = [mask for mask in masks if mask is not None]
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
    if present:
        mask = present[0] if len(present) == 1 else present[0] & present[1]
        mask = losses.mask_weights(replica, mask, values.dtype, loss.reduction)
        if sample_weight is not None:
            # Keras multiplies it in place, and torch counts that against the whole
            # batch, of which the replicas hold slices.
            sample_weight = sample_weight * 1
        # "sum": the mask's entries are taken as they are.
        sample_weight = keras_losses.apply_mask(
            sample_weight, mask, dtype=values.dtype, reduction="sum"
        )
    values = keras_losses.reduce_weighted_values(
        values, sample_weight, reduction="none", dtype=loss.dtype
    )
    return losses.reduce_values(replica, values, sample_weight, loss.reduction)
