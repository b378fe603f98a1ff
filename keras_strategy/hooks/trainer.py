"""Where Keras's trainer is extended on every backend: `fit` and its like."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.core import context
from keras_strategy.core.own_attributes import notice
from keras_strategy.hooks import mirror_check
from keras_strategy.hooks.adoption import adopt_variables
from keras_strategy.hooks.conditions import in_scope
from keras_strategy.hooks.data_adapters import for_keras
from keras_strategy.hooks.hook import model_hook
from keras_strategy.hooks.variables import stored
from keras_strategy.input import seeds
from keras_strategy.rules import chiefs_lead, entry_scope, first_values
from keras_strategy.rules.ownership import strategy_of_model

_LOOPS = ("fit", "evaluate", "predict")
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


@model_hook(("compile", *_LOOPS, *_ON_BATCH), ())
def _entry_point(original, self, *args, **kwargs):
    """It works in the scope of the model's strategy."""
    name = original.__name__
    strategy = strategy_of_model(self)
    args = [for_keras(x, strategy, name) for x in args]
    kwargs = {k: for_keras(x, strategy, name) for k, x in kwargs.items()}
    with entry_scope.left_for(strategy):
        if strategy is None:
            _require_no_scope(self, name)
            return original(self, *args, **kwargs)
        context.require_cross_replica(strategy, name)
        with entry_scope.entered(strategy):
            if name != "compile":  # which may be a part of a user's own
                adopt_variables(strategy, self)
            return _of_strategy(strategy, original, self, args, kwargs)


def _require_no_scope(model: keras.Model, name: str) -> None:
    current = context.current_scope()
    if current is not None:
        raise ValueError(
            f"`{name}` was called in the scope of {current!r} on the model "
            f"'{model.name}', which was made outside of it. Make the model inside "
            f"`with strategy.scope():`, or call `{name}` outside the scope to "
            "work on one device."
        )


def _of_strategy(
    strategy: Any, original: Callable, model: keras.Model, args: Any, kwargs: Any
) -> Any:
    """Keras's method, with the arguments that the replicas and workers need."""
    cluster = strategy.extended.cluster
    name = original.__name__
    if cluster is None and strategy.num_replicas_in_sync == 1:
        if name in _LOOPS:
            notice.end()  # there are no turns here
        return original(model, *args, **kwargs)
    try:
        call = _signature(original).bind(model, *args, **kwargs)
    except TypeError:
        return original(model, *args, **kwargs)  # which says what is wrong
    if cluster is not None and name != "compile":
        first_values.settle()
        seeds.take_chiefs(cluster)
        if name in _LOOPS:
            lead = functools.partial(_chiefs_lead, strategy)
            chiefs_lead.worker_arguments(name, call.arguments, cluster, lead)
    if mirror_check.enabled and name == "fit":
        add_callback(call.arguments, mirror_check.MirrorCheck(strategy))
    with strategy.extended.group.around(model, name, call.arguments):
        result = original(*call.args, **call.kwargs)
    if mirror_check.enabled:
        mirror_check.check(strategy, name)
    return result


_signature = functools.cache(inspect.signature)


def add_callback(arguments: dict[str, Any], callback: keras.callbacks.Callback) -> bool:
    """Adds a callback to the arguments of `fit` or its like.

    Args:
        arguments: The arguments by name; changed in place.
        callback: The callback, to be called last.

    Returns:
        Whether it was added: what the user put into a `CallbackList` is the user's.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return False
    arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), callback]
    return True


def _chiefs_lead(strategy: Any, every_batch: bool) -> chiefs_lead.ChiefsLead:
    def give_variables(model):
        variables = [*model.variables, *model.optimizer.variables]
        first_values.take_chiefs(
            strategy,
            [variable for variable in variables if stored(variable) is not None],
        )

    def set_epoch(model, epoch):
        model._initial_epoch = epoch

    return chiefs_lead.ChiefsLead(
        strategy.extended.cluster,
        give_variables,
        lambda model: model._initial_epoch,
        set_epoch,
        every_batch,
    )


@model_hook("_symbolic_build", "(self, iterator=None, data_batch=None)", when=in_scope)
def _symbolic_build(original, strategy, self, *args, **kwargs):
    """What fit builds may hold metrics from outside."""
    result = original(self, *args, **kwargs)
    adopt_variables(strategy, self)
    first_values.settle()
    return result
