"""Patches of Keras losses and metrics on every backend."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.per_replica_attributes import note_owner
from keras_strategy.core.variable_components import ChildScope
from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.patch import (
    SubclassPatch,
    find_module,
    hook,
    in_replica,
    in_scope,
    in_step,
)
from keras_strategy.training import row_weights
from keras_strategy.training.variable_sync import merged_values

keras_losses = find_module("apply_mask reduce_weighted_values", "keras.src.losses.loss")
keras_masking = find_module(
    "get_keras_mask set_keras_mask", "keras.src.backend.common.masking"
)


# The attribute of a loss that is computed on the gathered global batch.
NEEDS_ALL_ROWS = "_ks_needs_all_rows"
_CALL = "(self, y_true, y_pred, sample_weight=None)"


@hook(keras.losses.Loss, "__call__", _CALL, when=in_replica)
def _call(original, replica, self, y_true, y_pred, sample_weight=None):
    """Divide a replica's loss by the denominator of the global batch."""
    inputs = y_true, y_pred, sample_weight
    step, is_in_step = replica.step, replica.step.row_weight is not None
    if step.has_all_rows:
        return original(self, *inputs)
    mask = keras_masking.get_keras_mask(y_pred)
    # Keras's own code up to the reduction of the loss values.
    with keras.name_scope(self.name):
        true, pred = tree.map_structure(
            lambda x: ops.convert_to_tensor(x, dtype=self.dtype), (y_true, y_pred)
        )
        if is_in_step and NEEDS_ALL_ROWS not in vars(self):
            vars(self)[NEEDS_ALL_ROWS] = _needs_all_rows(self, true, pred)
        if not (is_in_step and vars(self)[NEEDS_ALL_ROWS]):
            values = self.call(true, pred)
            # It may return rows for one output and a scalar for another.
            if len(ops.shape(values)) > 0 or not is_in_step:
                masks = [mask, keras_masking.get_keras_mask(values)]
                return _reduce_loss(self, replica, values, sample_weight, masks)
    return _call_on_global_batch(replica, original, self, *inputs)


def _needs_all_rows(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> bool:
    """Return True if a loss returns a scalar, or compares rows."""
    # The reduction of such a loss is unknown: Dice divides sums over all rows, so no
    # mean of local values equals one device's. Circle is the only Keras loss that
    # compares rows and returns a value per row.
    if vars(loss).get("fn") is keras.losses.circle:
        return True
    # What this call assigns is dropped.
    scope = current_stateless_scope()
    with ChildScope((), scope):
        return len(ops.shape(loss.call(y_true, y_pred))) == 0


def _call_on_global_batch(replica, call, loss, y_true, y_pred, sample_weight):
    """Call a loss's `__call__` on the gathered global batch."""

    def call_loss(y_true, y_pred, sample_weight, mask):
        if mask is not None:
            keras_masking.set_keras_mask(y_pred, mask)
        return call(loss, y_true, y_pred, sample_weight)

    inputs = y_true, y_pred, sample_weight, keras_masking.get_keras_mask(y_pred)
    return row_weights.call_on_global_batch(replica, call_loss, *inputs)


def _reduce_loss(loss, replica, values, sample_weight, masks):
    """Reduce as Keras's `reduce_weighted_values`, for one replica of several."""
    values = ops.convert_to_tensor(values, dtype=loss.dtype)
    present = [mask for mask in masks if mask is not None]
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
    if present:
        mask = present[0] if len(present) == 1 else present[0] & present[1]
        mask = row_weights.mask_weights(replica, mask, values.dtype, loss.reduction)
        if sample_weight is not None:
            # Keras multiplies in place, which torch counts as a modification of the
            # global batch, because replicas hold slices of it.
            sample_weight = sample_weight * 1
        # "sum" uses the mask values unchanged.
        sample_weight = keras_losses.apply_mask(
            sample_weight, mask, dtype=values.dtype, reduction="sum"
        )
    values = keras_losses.reduce_weighted_values(
        values, sample_weight, reduction="none", dtype=loss.dtype
    )
    return row_weights.reduce_values(replica, values, sample_weight, loss.reduction)


_UPDATE = "(self, values, sample_weight=None)"


@hook(keras.metrics.Mean, "update_state", _UPDATE, when=in_step)
def _update_state(original, replica, self, values, sample_weight=None):
    """Count a scalar for the rows of this replica."""
    # Keras counts a scalar once per batch, but a batch spans all replicas.
    if (
        sample_weight is None
        and not isinstance(values, keras.KerasTensor)
        and len(getattr(values, "shape", ())) == 0  # a Python number has none
    ):
        sample_weight = replica.step.row_weight
    return original(self, values, sample_weight)


def _result_of_all_rows(original: Callable) -> Any:
    def result(self, *args, **kwargs):
        replica = in_step()
        if replica is None:
            return original(self, *args, **kwargs)
        merged = merged_values(replica, self.variables)
        scope = current_stateless_scope()
        with ChildScope(merged, scope):
            return original(self, *args, **kwargs)

    return result


@hook(keras.metrics.Metric, "__init__", ("name",), when=in_scope)
def _metric(original, strategy, self, *args, **kwargs):
    """Keep the contents of a metric's lists separate per replica."""
    original(self, *args, **kwargs)
    note_owner(self, strategy)


class _Results(SubclassPatch):
    """Compute a metric's result in a step from the rows of all replicas."""

    # The step then returns one device's values, under any key and in any formula. Each
    # metric class, including the user's, has its own `result`.

    owner = keras.metrics.Metric
    wrappers = {"result": _result_of_all_rows}


_results = _Results()


def step_metrics_result(get_metrics_result: Callable, replica: Any, model: Any) -> Any:
    """Return `get_metrics_result()` in a step; {} if the step returns nothing else."""
    # In that case it is computed outside of the replicas when it is read.
    return {} if replica.step.logs_are_metrics else get_metrics_result(model)


# --- Keras's `train_step` and `test_step` on torch

# All that they use in Keras 3.13 to 3.16.
_NAMES = """
_call_has_training_arg _compute_loss _loss_tracker all apply autograd backward
compute_metrics data_adapter_utils ddp_model detach flatten grad isinstance iter
jit_compile len next no_grad optimizer requires_grad run_eagerly scale_loss shape Tensor
torch trainable_weights tree unpack_x_y_sample_weight update_state value warn warnings
zero_grad
"""
_STEP_NAMES = frozenset(_NAMES.split())


def is_known_step(step: Callable) -> bool:
    """Return True if `compute_loss` and `update_metrics` do all of Keras's step."""
    # A Keras whose step does more has its forward pass compiled alone.
    return _STEP_NAMES.issuperset(step.__code__.co_names)


def compute_loss(
    model: Any, x: Any, y: Any, sample_weight: Any, training: bool
) -> tuple[Any, Any]:
    """Return the model's outputs and its loss."""
    options = {"training": training} if model._call_has_training_arg else {}
    y_pred = model(x, **options)
    return y_pred, model._compute_loss(x, y, y_pred, sample_weight, training)


def update_metrics(
    model: Any, x: Any, y: Any, y_pred: Any, loss: Any, sample_weight: Any
) -> None:
    rows = next(i for i in tree.flatten(x) if i is not None).shape[0]
    model._loss_tracker.update_state(loss, sample_weight=rows)
    model.compute_metrics(x, y, y_pred, sample_weight)
