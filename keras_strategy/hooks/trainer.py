"""Where Keras's trainer is extended on every backend: `fit` and its like."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.core import context
from keras_strategy.core.own_attributes import setattr_hooks
from keras_strategy.hooks import drift, mirror_check
from keras_strategy.hooks.adoption import adopt_variables
from keras_strategy.hooks.backups import backed_up
from keras_strategy.hooks.conditions import in_scope
from keras_strategy.hooks.data_adapters import building, for_keras, take_class_weight
from keras_strategy.hooks.hook import model_hook
from keras_strategy.hooks.variables import stored
from keras_strategy.input import seeds
from keras_strategy.input.ahead import stop_prefetchers_on_exit, prefetch_disabled
from keras_strategy.rules import alike, chiefs_lead, entry_scope, first_values
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
    if name == "fit":
        take_class_weight(original, self, args, kwargs)
    ended = stop_prefetchers_on_exit() if name in _LOOPS else contextlib.nullcontext()
    with ended, entry_scope.suspend_implicit_scope(strategy):
        if strategy is None:
            _require_no_scope(self, name)
            return original(self, *args, **kwargs)
        context.require_cross_replica(strategy, name)
        with entry_scope.enter_implicit_scope(strategy):
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
    alone = cluster is None and strategy.num_replicas_in_sync == 1
    if alone and name in _LOOPS:
        setattr_hooks.end()  # there are no turns here
    if alone and name != "fit":
        return original(model, *args, **kwargs)
    try:
        call = _signature(original).bind(model, *args, **kwargs)
    except TypeError:
        return original(model, *args, **kwargs)  # which says what is wrong
    if name == "fit":
        with backed_up(strategy, model, call.arguments):
            return _of_replicas(strategy, alone, original, model, call)
    return _of_replicas(strategy, alone, original, model, call)


def _of_replicas(
    strategy: Any, alone: bool, original: Callable, model: keras.Model, call: Any
) -> Any:
    if alone:
        return original(*call.args, **call.kwargs)
    cluster, name = strategy.extended.cluster, original.__name__
    if cluster is not None and name != "compile":
        first_values.broadcast_pending_values()
        if name == "fit":  # which says what it does when its callbacks are known
            seeds.sync_with_chief(cluster)
        else:  # one round for both: some are called for each batch
            said = alike.call_signature(call.arguments)
            told = alike.check_workers_agree(cluster, said, seeds.random_state_digest(), name)
            seeds.sync_with_chief(cluster, told)
        if name in _LOOPS:
            lead = functools.partial(_chiefs_lead, strategy, model, call.arguments)
            chiefs_lead.prepare_fit_arguments(name, call.arguments, cluster, lead)
    if name == "fit" and mirror_check.enabled:
        add_callback(call.arguments, mirror_check.BatchCheck(strategy))
    elif name == "fit" and cluster is None:
        add_callback(call.arguments, mirror_check.EpochCheck(strategy))
    with strategy.extended.group.trainer_scope(model, name, call.arguments):
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


def _chiefs_lead(
    strategy: Any,
    model: keras.Model,
    arguments: dict[str, Any],
    in_step: list[Any],
    own_minds: bool,
) -> chiefs_lead.SyncTrainingState:
    cluster = strategy.extended.cluster
    items = alike.fit_signature(model, compiled_with(model), arguments, in_step)

    def give_variables(model):
        variables = [*model.variables, *model.optimizer.variables]
        first_values.broadcast_from_chief(
            strategy,
            [variable for variable in variables if stored(variable) is not None],
        )

    def set_epoch(model, epoch):
        model._initial_epoch = epoch

    in_batches = any(alike.check_workers_agree(cluster, items, own_minds))
    kind = chiefs_lead.SyncTrainingStatePerBatch if in_batches else chiefs_lead.SyncTrainingState
    return kind(
        cluster,
        give_variables,
        lambda model: model._initial_epoch,
        set_epoch,
        functools.partial(drift.require_same_values, strategy),
    )


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """The arguments of a model's `compile`; none where its class has one of its own."""
    compiled = getattr(model, "_compile_config", None)
    return {} if compiled is None else compiled.config


@model_hook("_symbolic_build", "(self, iterator=None, data_batch=None)", when=in_scope)
def _symbolic_build(original, strategy, self, iterator=None, data_batch=None):
    """What fit builds may hold metrics from outside. One batch is read for it."""
    with prefetch_disabled(), building(iterator):
        result = original(self, iterator, data_batch)
    adopt_variables(strategy, self)
    first_values.broadcast_pending_values()
    return result
