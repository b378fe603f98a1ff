"""Where Keras's metrics are extended on every backend."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import tree

from keras_strategy.core.context import DryRun, distributed_replica, thread_state
from keras_strategy.hooks.conditions import in_step
from keras_strategy.hooks.hook import Extension, changed, home_of, hook, of_several
from keras_strategy.rules import row_trials
from keras_strategy.rules.metrics import merged_values
from keras_strategy.rules.row_trials import is_keras
from keras_strategy.rules.trials import DiscardUpdates, has_rows

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
                row_trials.audit_metric(at.step.warn_unless, self, args, kwargs)
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
