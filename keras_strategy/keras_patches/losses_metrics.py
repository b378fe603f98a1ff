"""Where Keras's losses are extended on every backend.

Where Keras's metrics are extended on every backend.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun, distributed_replica, thread_state
from keras_strategy.keras_patches.patch import (
    Extension,
    changed,
    home_of,
    hook,
    in_distributed_scope,
    in_replica_or_dry_run,
    in_step,
    of_several,
)
from keras_strategy.training import audit, row_weights
from keras_strategy.training.audit import is_keras
from keras_strategy.training.audit_checks import DiscardUpdates, has_rows
from keras_strategy.training.variable_sync import merged_values

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
                audit.audit_loss(step.warn_unless, self, true, pred)
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
    return not (audit.is_keras(function) and audit.is_keras(type(loss)))


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
    y_true, y_pred, sample_weight, mask = row_weights.gather_global_batch(
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
        mask = row_weights.mask_weights(replica, mask, values.dtype, loss.reduction)
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
    return row_weights.reduce_values(replica, values, sample_weight, loss.reduction)


stateless_scopes = home_of(
    "get_stateless_scope",
    "keras.src.backend.common.stateless_scope",
)

compiling = home_of("CompileMetrics MetricsList", "keras.src.trainers.compile_utils")
# What a model has its metrics in.
_JOIN = (compiling.CompileMetrics, compiling.MetricsList)


@of_several
def _in_step_or_trial_of_it() -> Any:
    """The replica that is running, in a step; or the trial of one."""
    trial = thread_state.dry_run
    if trial is not None:
        return None if trial.gradients is None else trial
    replica = distributed_replica()  # as `in_step`, without a call more
    return None if replica is None or replica.step.row_weight is None else replica


@hook(
    keras.metrics.Mean,
    "update_state",
    "(self, values, sample_weight=None)",
    when=_in_step_or_trial_of_it,
)
def _update_state(original, replica, self, values, sample_weight=None):
    """A scalar stands for this replica's rows.

    Keras counts a scalar once for each batch, and the batch is all replicas'.
    """
    if (
        sample_weight is None
        and not isinstance(values, keras.KerasTensor)
        and len(getattr(values, "shape", ())) == 0  # a Python number has none
    ):
        tried = isinstance(replica, DryRun)
        sample_weight = replica.row_fraction if tried else replica.step.row_weight
    return original(self, values, sample_weight)


# --- methods that each class has of its own


class _Results(Extension):
    """In a step, a metric's result is that of the rows of all replicas.

    What a step returns is then one device's, under any key and in any formula. Each
    class of metrics has a `result` of its own, a user's classes too. And it is tried
    whether the updates of a user's metric add up over the replicas, see
    `rules.row_trials`.
    """

    @property
    def of_several(self) -> bool:
        """The results of steps alone are changed."""
        return True

    @property
    def target(self) -> str:
        """The method, which each class has of its own."""
        return "Metric.result"

    def check(self) -> None:
        """Raises `KerasVersionError` unless every metric has one."""
        for name in ("result", "update_state"):
            if name not in vars(keras.metrics.Metric):
                raise changed(f"Metric.{name}", "is gone")

    def install(self) -> None:
        """Replaces those of all classes that there are."""
        classes = [keras.metrics.Metric]
        while classes:
            cls = classes.pop()
            replace_methods(cls)
            classes += cls.__subclasses__()


_results = _Results()


@hook(
    keras.metrics.Metric,
    "__init__",
    "(self, dtype=None, name=None)",
    several=True,
)
def _init(original, self, *args, **kwargs):
    """Classes of metrics that were made later have results of their own, too."""
    for cls in type(self).__mro__:
        if issubclass(cls, keras.metrics.Metric):
            replace_methods(cls)
    original(self, *args, **kwargs)


def replace_methods(cls: type) -> None:
    """Replaces `result`, and `update_state` if it may call a user's code."""
    keras_own = is_keras(cls) or issubclass(cls, _JOIN)
    around = {"result": _result_of_all_rows}
    if cls is keras.metrics.MeanMetricWrapper or not keras_own:
        around["update_state"] = _update_that_is_tried
    for name, make in around.items():
        original = vars(cls).get(name)
        if callable(original) and not hasattr(original, "_ks_original"):
            replacement: Any = functools.wraps(original)(make(original))
            replacement._ks_original = original
            setattr(cls, name, replacement)


def _result_of_all_rows(original: Callable) -> Any:
    def result(self, *args, **kwargs):
        replica = in_step()
        if replica is None:
            return original(self, *args, **kwargs)
        with _AllReplicas(merged_values(replica, self.variables)):
            return original(self, *args, **kwargs)

    return result


def _update_that_is_tried(original: Callable) -> Any:
    def update_state(self, *args, **kwargs):
        at = _in_step_or_trial_of_it()
        if isinstance(at, DryRun):
            if _given_rows(args, kwargs):
                with DiscardUpdates():  # it is tried by itself
                    return original(self, *args, **kwargs)
        elif at is not None and at.step.warn_unless is not None:
            wraps = type(self) is keras.metrics.MeanMetricWrapper
            if not is_keras(self._fn if wraps else type(self)):
                audit.audit_metric(at.step.warn_unless, self, args, kwargs)
        return original(self, *args, **kwargs)

    return update_state


def _given_rows(args: tuple, kwargs: dict) -> bool:
    return any(map(has_rows, tree.flatten((args, kwargs))))


class _AllReplicas(keras.StatelessScope):
    """What some variables hold over all replicas; the others are as around it.

    Args:
        values: Pairs of a variable and its value.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]]):
        super().__init__(initialize_variables=False)
        self.parent = stateless_scopes.get_stateless_scope()
        self.state_mapping.update((id(v), value) for v, value in values)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None and self.parent is not None:
            return self.parent.get_current_value(variable)
        return value


def results_of_step(get_metrics_result: Callable, replica: Any, model: Any) -> Any:
    """What `get_metrics_result` gives in a step.

    Nothing, where it is all that the step returns: it is asked for again outside of the
    replicas, if somebody reads it.

    Args:
        get_metrics_result: Keras's method.
        replica: The replica, in a step.
        model: The model.
    """
    return {} if replica.step.logs_are_metrics else get_metrics_result(model)
