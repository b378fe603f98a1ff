"""Where Keras's metrics are extended on every backend."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_strategy.hooks.conditions import in_step
from keras_strategy.hooks.hook import Extension, changed, home_of, hook
from keras_strategy.rules import row_trials
from keras_strategy.rules.metrics import merged
from keras_strategy.rules.row_trials import is_keras

stateless_scopes = home_of(
    "get_stateless_scope",
    "keras.src.backend.common.stateless_scope",
)

compiling = home_of("CompileMetrics MetricsList", "keras.src.trainers.compile_utils")
# What a model has its metrics in.
_JOIN = (compiling.CompileMetrics, compiling.MetricsList)


@hook(
    keras.metrics.Mean,
    "update_state",
    "(self, values, sample_weight=None)",
    when=in_step,
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
        sample_weight = replica.step.row_weight
    return original(self, values, sample_weight)


# --- methods that each class has of its own


class _OfEachClass(Extension):
    """A method that each class of metrics has of its own, a user's classes too."""

    method: str

    @property
    def target(self) -> str:
        """The method."""
        return f"Metric.{self.method}"

    def check(self) -> None:
        """Raises `KerasVersionError` unless every metric has one."""
        if self.method not in vars(keras.metrics.Metric):
            raise changed(self.target, "is gone")

    def install(self) -> None:
        """Replaces those of all classes that there are."""
        classes = [keras.metrics.Metric]
        while classes:
            cls = classes.pop()
            self.replace(cls)
            classes += cls.__subclasses__()

    def replace(self, cls: type) -> None:
        """Replaces the one that a class defines, if it does."""
        original = vars(cls).get(self.method)
        if not callable(original) or hasattr(original, "_ks_original"):
            return
        replacement = functools.wraps(original)(self.around(original))
        replacement._ks_original = original  # pyright: ignore
        setattr(cls, self.method, replacement)

    def around(self, original: Callable) -> Callable:
        """What is called instead."""
        raise NotImplementedError


class _Results(_OfEachClass):
    """In a step, a metric's result is that of the rows of all replicas.

    What a step returns is then one device's, under any key and in any formula. Each
    class of metrics has a `result` of its own, a user's classes too.
    """

    method = "result"

    def around(self, original: Callable) -> Callable:
        def result(self, *args, **kwargs):
            replica = in_step()
            if replica is None:
                return original(self, *args, **kwargs)
            with _AllReplicas(merged(replica, self.variables)):
                return original(self, *args, **kwargs)

        return result


class _Updates(_OfEachClass):
    """In the first step it is tried whether a user's metric adds up over replicas.

    What the replicas hold of its variables is added up.
    """

    method = "update_state"

    def replace(self, cls: type) -> None:
        """Replaces the one of a class that is not Keras's, or calls a function."""
        keras_own = is_keras(cls) or issubclass(cls, _JOIN)
        if cls is keras.metrics.MeanMetricWrapper or not keras_own:
            super().replace(cls)

    def around(self, original: Callable) -> Callable:
        def update_state(self, *args, **kwargs):
            replica = in_step()
            if replica is not None and replica.step.warn_unless is not None:
                function = vars(self).get("_fn", type(self))
                if not (is_keras(function) and is_keras(type(self))):
                    row_trials.of_metric(replica.step.warn_unless, self, args, kwargs)
            return original(self, *args, **kwargs)

        return update_state


_results = _Results()
_updates = _Updates()


@hook(keras.metrics.Metric, "__init__", "(self, dtype=None, name=None)")
def _init(original, self, *args, **kwargs):
    """Classes of metrics that were made later have methods of their own, too."""
    for cls in type(self).__mro__:
        if issubclass(cls, keras.metrics.Metric):
            _results.replace(cls)
            _updates.replace(cls)
    original(self, *args, **kwargs)


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
