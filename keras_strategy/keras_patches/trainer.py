"""Patches of `fit`, `evaluate`, `predict` and the calls of callbacks for each batch."""

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import setattr_hooks
from keras_strategy.core.registry import get_engine
from keras_strategy.data.prefetch import prefetch_disabled, stop_prefetchers_on_exit
from keras_strategy.keras_patches import consistency as mirror_consistency
from keras_strategy.keras_patches import data_adapters
from keras_strategy.keras_patches.fingerprint import write_report_if_requested
from keras_strategy.keras_patches.internals import global_state
from keras_strategy.keras_patches.layers import all_layers, report_normalizations
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_scope,
    model_hook,
)
from keras_strategy.keras_patches.resume import back_up_fit
from keras_strategy.keras_patches.variables_optimizers import adopt_variables
from keras_strategy.training import consistency, ownership
from keras_strategy.training.callbacks import (
    CHIEF_ONLY_CALLBACKS,
    DETERMINISTIC_CALLBACKS,
    SYNCHRONIZED_CALLBACKS,
    LogFreeCallback,
    given_callbacks,
    let_chief_write,
    replace_callbacks,
)
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.resume import random_state_digest, sync_random_states
from keras_strategy.training.row_weights import WHOLE
from keras_strategy.training.saving import run_first_step
from keras_strategy.training.train_step import report_differing_rows

_SAVING_CALLBACKS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
_PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# A Keras method that ignores a batch and its logs.
_NO_OP = keras.callbacks.Callback().on_batch_end


@hook(
    keras.callbacks.CallbackList,
    ("on_epoch_begin", "on_test_begin", "on_predict_begin"),
    ("logs",),
)
def _on_begin(original, self, *args, **kwargs):
    """Skip the logs of a batch if no callback reads them."""
    # Keras passes the logs of every batch to a thread that reads them, or waits for
    # them, before it calls the callbacks, most of which only handle epochs.
    original(self, *args, **kwargs)
    kind = original.__name__.split("_")[1].replace("epoch", "train")
    is_subclass = type(self) is not keras.callbacks.CallbackList
    for time in ("begin", "end"):
        name = f"on_{kind}_batch_{time}"
        vars(self).pop(name, None)
        handlers = [c for c in self.callbacks if _handles_batches(c, kind, time)]
        are_read = is_subclass or any(
            not isinstance(callback, LogFreeCallback) for callback in handlers
        )
        shared = getattr(getattr(self, "_model", None), BATCH_LOGS, {}).get(kind)
        if shared is not None and time == "end":
            are_read = shared.are_needed(are_read) and are_read
        if not are_read and context.current_scope() is not None:
            methods = [getattr(callback, name) for callback in handlers]
            call_all = functools.partial(_call_without_logs, methods)
            vars(self)[name] = call_all if methods else _NO_OP


def _handles_batches(callback: Any, kind: str, time: str) -> bool:
    """Return True if a callback has a method for the "begin" or "end" of a batch."""
    if type(callback) in _SAVING_CALLBACKS and callback.save_freq == "epoch":
        return False
    names = [f"on_{kind}_batch_{time}", *[f"on_batch_{time}"] * (kind == "train")]
    functions = [getattr(getattr(callback, x, None), "__func__", None) for x in names]
    return functions != [getattr(keras.callbacks.Callback, x) for x in names]


def _call_without_logs(methods: list[Callable], batch: int, logs: Any = None) -> None:
    for method in methods:
        method(batch, logs={})


# The attribute of a model with the `BatchLogs` of its loops, by the kind of the steps.
BATCH_LOGS = "_ks_batch_logs"


class BatchLogs:
    """The logs of batches in `fit` or `evaluate`, reduced if a worker reads them."""

    def __init__(self, cluster: Any):
        self._cluster = cluster
        self.are_read: bool | None = None

    def are_needed(self, are_read: bool) -> bool:
        """Return True if a worker reads them, given if this one does."""
        if self._cluster is None:
            self.are_read = are_read
        elif self.are_read is None:  # once for all epochs of `fit`
            operation = "whether the logs of batches are read"
            self.are_read = any(self._cluster.exchange(operation, are_read))
        return bool(self.are_read)


keras_tracebacks = find_module("include_frame", "keras.src.utils.traceback_utils")


@hook(keras_tracebacks, "include_frame", "(fname)", multi_replica_only=True)
def _include_frame(original, fname):
    """Remove frames of this package from tracebacks where Keras removes its frames."""
    return original(fname) and not fname.startswith(_PACKAGE_FOLDER)


_LOOPS = ("fit", "evaluate", "predict")
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


@model_hook(("compile", *_LOOPS, *_ON_BATCH), ())
def _entry_point(original, self, *args, **kwargs):
    """Run the method in the scope of the model's strategy, on distributed data."""
    name = original.__name__
    strategy = strategy_of_model(self)
    args = [data_adapters.for_keras(x, strategy, name) for x in args]
    kwargs = {k: data_adapters.for_keras(x, strategy, name) for k, x in kwargs.items()}
    if name == "fit":
        data_adapters.take_class_weight(original, self, args, kwargs)
    elif name == "compile":
        vars(self).pop(WHOLE, None)
    prefetch_scope = (
        stop_prefetchers_on_exit() if name in _LOOPS else contextlib.nullcontext()
    )
    with prefetch_scope, ownership.suspend_implicit_scope(strategy):
        if strategy is None:
            current = context.current_scope()
            if current is not None:
                raise ValueError(
                    f"`{name}` was called in the scope of {current!r} on the model "
                    f"'{self.name}', which was created outside of it. Create the model "
                    f"in `with strategy.scope():`, or call `{name}` outside the scope "
                    "to work on one device."
                )
            return original(self, *args, **kwargs)
        context.require_cross_replica(strategy, name)
        with ownership.enter_implicit_scope(strategy):
            if name != "compile":  # which the user's `compile` may call
                adopt_variables(strategy, self)
            return _call_with_strategy(strategy, original, self, args, kwargs)


def _call_with_strategy(
    strategy: Any, original: Callable, model: keras.Model, args: Any, kwargs: Any
) -> Any:
    """Call Keras's method with the arguments that replicas and workers need."""
    cluster = strategy.extended.cluster
    name = original.__name__
    is_single = cluster is None and strategy.num_replicas_in_sync == 1
    if is_single and name in _LOOPS:
        setattr_hooks.end()  # replicas do not take turns here
    if is_single and name != "fit":
        return original(model, *args, **kwargs)
    try:
        call = _signature(original).bind(model, *args, **kwargs)
    except TypeError:
        return original(model, *args, **kwargs)  # which reports the error
    backups = contextlib.nullcontext()
    if name == "fit":
        backups = back_up_fit(strategy, model, call.arguments)
    with backups:
        if is_single:
            result = original(*call.args, **call.kwargs)
        else:
            result = _call_with_replicas(strategy, original, model, call)
    if name == "fit":
        write_report_if_requested(model)
    return result


def _call_with_replicas(
    strategy: Any, original: Callable, model: keras.Model, call: Any
) -> Any:
    cluster, name = strategy.extended.cluster, original.__name__
    if cluster is not None and name != "compile":
        ownership.broadcast_pending_values()
        if name == "fit":  # compared when its callbacks are known
            sync_random_states(cluster)
        else:  # one exchange for both: called for each batch
            signature = consistency.call_signature(call.arguments)
            digests = consistency.check_workers_agree(
                cluster, signature, random_state_digest(), name
            )
            sync_random_states(cluster, digests)
        if name in _LOOPS:
            _prepare_callbacks(strategy, model, name, call.arguments)
    callbacks = call.arguments.get("callbacks")
    if name == "fit" and not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = keras.tree.flatten(callbacks or [])
        if mirror_consistency.check_each_batch:
            callbacks.append(mirror_consistency.BatchCheck(strategy))
        elif cluster is None:
            callbacks.append(mirror_consistency.EpochCheck(strategy))
        call.arguments["callbacks"] = [
            *(make() for make in first_callbacks),
            *callbacks,
        ]
    with strategy.extended.group.trainer_scope(model, name, call.arguments):
        result = original(*call.args, **call.kwargs)
    if mirror_consistency.check_each_batch:
        mirror_consistency.check_mirrored_variables(strategy, name)
    return result


# Classes of callbacks that come before the user's, which higher layers add.
first_callbacks: list[Callable[[], keras.callbacks.Callback]] = []
_signature = functools.cache(inspect.signature)


def _prepare_callbacks(
    strategy: Any, model: keras.Model, method: str, arguments: dict[str, Any]
) -> None:
    """Check that workers agree; adapt callbacks and output to this one."""
    cluster = strategy.extended.cluster
    if not cluster.is_chief:
        arguments["verbose"] = 0
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList) and method != "fit":
        return  # `fit` passes its list to `evaluate`
    callbacks = given_callbacks(arguments)
    cluster.client.notes["callbacks"] = ", ".join(type(c).__name__ for c in callbacks)
    kept = callbacks
    if not cluster.is_chief:
        kept = [c for c in callbacks if not isinstance(c, CHIEF_ONLY_CALLBACKS)]
        let_chief_write(kept)
    if method == "fit":
        in_step = [c for c in callbacks if isinstance(c, SYNCHRONIZED_CALLBACKS)]
        # One of the others may decide by local data.
        acts_alone = not all(type(c) in DETERMINISTIC_CALLBACKS for c in callbacks)
        compiled = getattr(model, "_compile_config", None)  # not if it is overridden
        settings = {} if compiled is None else compiled.config
        lookups = [x for x in all_layers(model) if hasattr(x, "get_vocabulary")]
        signature = consistency.fit_signature(
            model, settings, arguments, in_step, lookups
        )
        act_alone = consistency.check_workers_agree(cluster, signature, acts_alone)
        sync = mirror_consistency.SyncTrainingState
        if any(act_alone):
            sync = mirror_consistency.SyncTrainingStatePerBatch
        kept = [*kept, sync(strategy)]
    replace_callbacks(arguments, kept)


def build_from_batch(model: keras.Model, batch: Any) -> None:
    """Build a model, its optimizer, losses and metrics for a batch of arrays."""

    def to_symbolic(leaf):
        # Keras knows no dtype of NumPy's for strings.
        is_text = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU"
        return keras.ops.convert_to_tensor(leaf) if is_text else leaf

    model._symbolic_build(data_batch=keras.tree.map_structure(to_symbolic, batch))


# The attribute of a model that Keras has built from a batch.
_IS_BUILT = "_ks_is_built"


def build_for_step(model: keras.Model, kind: str, batch: Any) -> bool:
    """Build the layers that a step uses; return False if only the step can do it."""
    # A model without `call` is never built: its steps call its layers.
    layers = [x for x in all_layers(model) if type(x).call is not keras.Model.call]
    if vars(model).get(_IS_BUILT) or all(layer.built for layer in layers):
        return True

    def make_symbolic(array):
        dtype = keras.backend.standardize_dtype(array.dtype)
        return keras.KerasTensor(array.shape, dtype)

    if kind == "predict":
        x, _, _ = keras.utils.unpack_x_y_sample_weight(getattr(batch, "batch", batch))
        try:
            model(keras.tree.map_structure(make_symbolic, x))
        except Exception:
            return False
        vars(model)[_IS_BUILT] = True
    return kind == "predict"


def build_compiled_metrics(model: keras.Model, batch: Any) -> None:
    """Build the metrics of a model that was compiled again in `fit`."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        build_from_batch(model, batch)


@model_hook("_symbolic_build", "(self, iterator=None, data_batch=None)", when=in_scope)
def _symbolic_build(original, strategy, self, iterator=None, data_batch=None):
    """Adopt metrics from outside the scope when `fit` builds the model."""
    batches = [] if data_batch is None else [data_batch]
    recorded = None if iterator is None else _recorded(iterator, batches)
    with (
        prefetch_disabled(),
        data_adapters.building(iterator),
        report_differing_rows(batches),
    ):
        result = original(self, recorded, data_batch)
    vars(self)[_IS_BUILT] = True
    adopt_variables(strategy, self)
    ownership.broadcast_pending_values()
    return result


def _recorded(iterator: Any, batches: list[Any]) -> Iterator[tuple[int, int, list]]:
    """Yield what Keras's iterator does, and append the first batch of each step."""
    for begin, end, data in iterator:
        step = data if isinstance(data, list | tuple) else [next(data)]
        batches.append(step[0])
        yield begin, end, list(step)


@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
    when=strategy_of_model,
)
def _make_function(original, strategy, self, force=False):
    """Create a function that runs a batch on the replicas."""
    kind = original.__name__.split("_")[1]
    name = f"{kind}_function"
    before = getattr(self, name)
    if before is not None and not force:
        return original(self)

    def make():
        original(self, force)
        return getattr(self, name)

    step = get_engine().make_step_function(strategy, self, kind, make)
    setattr(self, name, step)
    if strategy.num_replicas_in_sync == 1:
        return step
    if kind == "train":
        report_normalizations(strategy, self)

    # A first step may be slow, for example during compilation.
    what = f"{kind} step of the model '{self.name}'"
    cluster = strategy.extended.cluster
    first_steps = [functools.partial(run_first_step, step, what, cluster)]

    @functools.wraps(step)
    def first(*args):
        # Not if the user has wrapped it; the wrapper calls it in each step.
        if getattr(self, name) is this():
            setattr(self, name, step)
        return (first_steps.pop() if first_steps else step)(*args)

    this = weakref.ref(first)  # JAX reuses programs of steps that a cycle keeps alive
    setattr(self, name, first)
    return first


# Keras's names for what the scopes of strategies and replicas set in this thread.
_SCOPES = ("distribution", "torch_device", "stateless_scope")


@hook(keras.backend, "clear_session", "(free_memory=True)", when=in_scope)
@hook(keras.utils, "clear_session", "(free_memory=True)", when=in_scope)
def _clear_session(original, strategy, free_memory=True):
    """Keep what open scopes have set."""
    # Without it, later variables and batches are on other devices than earlier ones.
    kept = {name: global_state.get_global_attribute(name) for name in _SCOPES}
    original(free_memory)
    for name, value in kept.items():
        global_state.set_global_attribute(name, value)
