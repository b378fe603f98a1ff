"""Modules of torch's own, which a replica calls with its own tensors.

Where the torch adapter extends Keras, beside `keras_strategy/keras_patches`.

On torch, Keras writes to the variables as it goes. What belongs to one replica must be
kept apart from what belongs to the others; see `backends/threads/hooks.py` for
what does not depend on torch.
"""

import functools
from typing import Any

import keras
import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from keras_strategy.backends.threads import patches as thread_hooks
from keras_strategy.backends.torch import sharding, state
from keras_strategy.backends.torch.replica import (
    InPlaceReplica,
    TorchReplica,
    direct_replica,
)
from keras_strategy.backends.torch.training import BatchLogs
from keras_strategy.core.context import distributed_replica, thread_state
from keras_strategy.data.indexed_dataset import LoaderRowReader
from keras_strategy.data.local_rows import local_bounds_fn
from keras_strategy.data.worker_batches import SynchronizedBatches
from keras_strategy.keras_patches.data_adapters import (
    RowsOfArrays,
    builds,
    counts_of_arrays,
    is_own,
    joined,
    own_rows,
    pauses_after,
    read_ahead,
)
from keras_strategy.keras_patches.losses_metrics import results_of_step
from keras_strategy.keras_patches.patch import (
    changed,
    home_of,
    hook,
    in_distributed_scope,
    in_replica,
    in_scope_of_workers,
    in_step,
    model_hook,
    of_several,
    of_strategy,
)
from keras_strategy.keras_patches.random import of_own_rows
from keras_strategy.keras_patches.variables_optimizers import stored
from keras_strategy.options import GLOBAL
from keras_strategy.training import ownership
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.saving import overridden_value


def call_module(
    replica: TorchReplica,
    module: torch.nn.Module,
    variables: list[Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module on a replica.

    Args:
        replica: The replica.
        module: The module, whose tensors are the first replica's.
        variables: The `keras.Variable`s of its Parameters.
        args: Positional arguments of its call.
        kwargs: Keyword arguments.

    Raises:
        ValueError: If the call changes a buffer that is not one of the statistics of
            torch's batch normalizations; or if these are to be of the global batch.
    """
    if module.training and replica.context.strategy.batch_statistics == GLOBAL:
        _require_no_statistics(module)
    own = {id(stored(variable)): variable.value for variable in variables}
    parameters = {
        name: own.get(id(parameter), parameter)
        for name, parameter in module.named_parameters()
    }
    buffers = {
        name: buffer.detach().to(replica.scope.device, copy=True)
        for name, buffer in module.named_buffers()
    }
    outputs = functional_call(module, parameters | buffers, args, kwargs)
    if module.training and buffers:
        _bring_together(replica, module, buffers)
    return outputs


def _require_no_statistics(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise ValueError(
                f"The strategy has batch_statistics='global', and the part '{name}' of "
                f"a {type(module).__name__} is torch's {type(part).__name__}, which "
                "normalizes by each replica's rows. Use "
                "`keras.layers.BatchNormalization`, or leave `batch_statistics` out."
            )


@torch.no_grad()
def _bring_together(
    replica: TorchReplica, module: torch.nn.Module, buffers: dict[str, torch.Tensor]
) -> None:
    """Writes what a call made of a module's buffers: once, for all replicas."""
    statistics = {
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm)
        for buffer, _ in part.named_buffers(recurse=False)
    }
    for name, buffer in module.named_buffers():
        if name not in statistics and not torch.equal(
            buffer, buffers[name].to(buffer.device)
        ):
            raise ValueError(
                f"The buffer '{name}' of a {type(module).__name__} changes when the "
                "module is called, and each replica would change it in its own way. "
                "Only the statistics of torch's batch normalizations are brought "
                "together. Keep that state in a `keras.Variable` with an aggregation, "
                "or train on one device."
            )
    # Their mean is weighted by rows, as that of Keras's own layer.
    names = [name for name in buffers if name in statistics]
    means = [name for name in names if buffers[name].is_floating_point()]
    weight = replica.step.row_weight
    if weight is None:
        weight = 1 / replica.topology.num_replicas
    found = replica.weighted_sum([buffers[name] for name in means], weight)
    if replica.index == 0:  # it goes on first, and nobody needs the old ones
        new = {**buffers, **dict(zip(means, found, strict=True))}
        for name, buffer in module.named_buffers():
            if name in statistics:
                buffer.copy_(new[name])


keras_random = home_of("dropout", "keras.src.backend.torch.random")
AutocastScope: Any = home_of(
    "AutocastScope", "keras.src.backend.common.variables"
).AutocastScope
TorchEpochIterator: Any = home_of(
    "TorchEpochIterator", "keras.src.backend.torch.trainer"
).TorchEpochIterator

# --- random numbers


@hook(
    keras_random,
    "dropout",
    "(inputs, rate, noise_shape=None, seed=None)",
    when=in_replica,
)
def _dropout(original, replica, inputs, rate, noise_shape=None, seed=None):
    """Without a seed it draws from the replica's generator, not the process's.

    Also for a `SeedGenerator` without one, whose state it leaves as it is.
    """
    if of_own_rows() is not None or replica.step.is_drawing:
        return original(inputs, rate, noise_shape, seed)
    seeded = seed is not None and getattr(seed, "_initial_seed", seed) is not None
    if (
        seeded
        or noise_shape is not None
        or inputs.device.type == "meta"
        or not 0 < rate < 1
    ):
        return original(inputs, rate, noise_shape, seed)
    return inputs * replica.dropout_mask(inputs, 1.0 - rate)


# --- variables


global_state = thread_hooks.global_state


def _finds_settings() -> bool:
    """Whether what decides how this Keras reads a variable is found where it was."""
    settings = global_state.GLOBAL_STATE_TRACKER
    names = ("stateless_scope", "autocast_scope", "torch_device")
    scope, cast = keras.StatelessScope(initialize_variables=False), AutocastScope(None)
    with scope, cast, keras.device("meta"):
        found = [getattr(settings, name, None) for name in names]
    return found == [scope, cast, "meta"]


_settings_are_known = _finds_settings()


@hook(keras.Variable, "value", None, several=True)
def _value(original, self):
    """Outside of replicas an on_read variable is aggregated.

    With no replica's scope in the thread, Keras would read the first component. And a
    first value that is read is the chief's on every worker.
    """
    # Read very often: what asks for nothing more is seen first, and without the call
    # that a condition would be.
    own = self.__dict__.get(state.ATTRIBUTE)
    if own is not None and own.shares is not None:
        device = getattr(global_state.GLOBAL_STATE_TRACKER, "torch_device", None)
        whole = None if device == "meta" else sharding.full_value(self, own)
        return original(self) if whole is None else self._maybe_autocast(whole)
    running = thread_state.replica
    if running is not None and isinstance(running._replica, InPlaceReplica):
        replica, tensor = running._replica, stored(self)
        if (
            own is None
            or own.is_noted
            or own.first is not tensor
            or own.layout is not replica.layout
            or (
                replica.step.is_applying
                and not replica.is_partly_updated
                and id(tensor) not in replica.before
            )
        ):
            here = direct_replica()
            if here is not None and tensor is not None:
                here.reads(self)
        # Another one since `clear_session` was called.
        settings = global_state.GLOBAL_STATE_TRACKER
        if (
            _settings_are_known
            and tensor is not None
            and getattr(settings, "stateless_scope", None) is None
            and getattr(settings, "autocast_scope", None) is None
            and getattr(settings, "torch_device", None) == replica.device
        ):
            return tensor  # as Keras does, after ten calls
        return original(self)
    if ownership.pending_values and thread_hooks.current_stateless_scope() is None:
        ownership.broadcast_pending_values()
    if (
        own is None
        or not own.on_read
        or thread_hooks.current_stateless_scope() is not None
    ):
        return original(self)
    own = state.find_components(self)
    if own is None:
        return original(self)
    known = overridden_value(self)
    if known is None:
        known = own.aggregated(self)
    return self._maybe_autocast(known)


@hook(keras.Variable, "_initialize", "(self, value)", when=in_scope_of_workers)
def _initialize(original, strategy, self, value):
    """The first value is the chief's on every worker."""
    original(self, value)
    ownership.register_initial_value(strategy, self)


@of_several
def _writer(variable):
    """What writes to a variable: the replica that is running, or its components."""
    replica = distributed_replica()
    return (
        replica
        if isinstance(replica, InPlaceReplica)
        else state.find_components(variable)
    )


@hook(keras.Variable, "_direct_assign", "(self, value)", when=_writer)
def _direct_assign(original, writer, self, value):
    """Outside of replicas all components are written."""
    writer.assign(self, value)


@hook(keras.Variable, "__init__", (), when=direct_replica)
def _init(original, replica, self, *args, **kwargs):
    """A replica makes no variable that has a value, the only one of a process neither.

    Keras gives it none in a scope of its own, and says what is wrong.
    """
    with keras.StatelessScope(initialize_variables=False):
        original(self, *args, **kwargs)


# --- layers


@of_several
def _while_values_wait(layer):
    """The variables that wait for the chief's values, if there are some."""
    return ownership.pending_values or None


@hook(keras.Layer, "_track_variables", "(self)", when=_while_values_wait)
def _track_variables(original, waiting, self):
    """Torch is shown the variables' tensors, and nobody looks into them.

    The chief's values are written into them later.
    """
    with ownership.without_broadcast():
        original(self)


@hook(keras.Layer, "zero_grad", "(self, set_to_none=True)", when=in_replica)
def _zero_grad(original, replica, self, set_to_none=True):
    """Keras's train_step forgets this replica's gradients.

    torch would clear those of the first replica, from every replica's thread.
    """
    if isinstance(replica, InPlaceReplica):
        original(self, set_to_none)
        return
    for variable in self.variables:
        variable.value.grad = None


@hook(
    keras.layers.TorchModuleWrapper,
    "call",
    "(self, *args, training=None, **kwargs)",
    when=in_replica,
)
def _call_module(original, replica, self, *args, training=None, **kwargs):
    """It computes with this replica's Parameters, not with those of the first."""
    self.train(training is not False)
    return call_module(replica, self.module, self.variables, args, kwargs)


# --- the trainer


@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
)
def _make_function(original, self, force=False):
    """What it makes for a batch is `strategy.run`."""
    from keras_strategy.backends.torch.training import distributed_function

    kind = original.__name__.split("_")[1]
    before = getattr(self, f"{kind}_function")
    original(self, force)
    logs = BatchLogs.of(before)
    if logs is not None:
        logs.reset()  # until a loop with callbacks begins
    strategy = strategy_of_model(self)
    if strategy is None:
        return
    _require_unwrapped(self)
    if strategy.num_replicas_in_sync == 1:
        return
    if getattr(self, f"{kind}_function") is not before:
        setattr(self, f"{kind}_function", distributed_function(self, kind, strategy))


@of_several
def _of_several():
    """The strategy whose scope this is, if it has several replicas, or workers."""
    return in_distributed_scope() or in_scope_of_workers()


@hook(TorchEpochIterator, "_get_iterator", "(self)", when=_of_several)
def _get_iterator(original, strategy, self):
    """Several workers agree on their batches, and read their own rows of them.

    And what nobody sees is read ahead. A model is built with a whole batch, as on one
    device.
    """
    ahead = functools.partial(read_ahead, self, scope=strategy.extended.group.scope)
    cluster = strategy.extended.cluster
    if cluster is None:
        return ahead(original(self))
    to_split = strategy.num_replicas_in_sync > 1 and not builds(self)
    if is_own(self):
        local = len(strategy.extended.worker_devices)
        batches = joined(self, ahead(original(self)), cluster, local, same_shapes=False)
        return batches if to_split else batches.as_read()
    batches = None
    if to_split:
        batches = own_rows(self.data_adapter, local_bounds_fn(strategy), _OnHost)
        if batches is not None and not isinstance(
            batches, LoaderRowReader | RowsOfArrays
        ):
            batches = _as_loader(batches)
    batches = ahead(original(self) if batches is None else batches)
    counts = counts_of_arrays(self.data_adapter)
    pauses = pauses_after(self, batches)
    return SynchronizedBatches(batches, cluster, counts, pauses, tells=not builds(self))


class _OnHost:
    """What Keras reads of an adapter, in tensors that stay where they are read."""

    def __init__(self, adapter):
        self._batches = adapter.get_torch_dataloader()

    def __iter__(self):
        return _on_host(iter(self._batches))


def _on_host(batches):
    while True:
        with keras.device("cpu"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class _Stream(IterableDataset):
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def _as_loader(batches):
    """Draws what Keras's own loader of batches draws from torch's generator."""
    return DataLoader(_Stream(batches), batch_size=None, collate_fn=lambda batch: batch)


# --- what Keras distributes by itself


if hasattr(keras.Model, "_initialize_ddp"):

    @model_hook("_initialize_ddp", "(self)", when=of_strategy)
    def _initialize_ddp(original, strategy, self):
        """A model of ours is distributed once, by its strategy.

        From 3.16 on Keras wraps every model in DistributedDataParallel where
        torch.distributed is initialised. It would broadcast the weights and sum the
        gradients a second time, and from every replica's thread.
        """


@model_hook("get_metrics_result", "(self)", when=of_strategy)
def _get_metrics_result(original, strategy, self):
    """The states of all metrics travel at once, between our workers alone.

    Each state that is read on its own is a collective of its own. And where
    torch.distributed is initialised, Keras 3.16 sums them over all of its processes.
    """
    replica = in_step()
    if replica is not None:
        return results_of_step(_neutral_metrics_result, replica, self)
    if strategy.extended.cluster is None or _is_inside():
        return _neutral_metrics_result(self)
    from keras_strategy.backends.torch.training import metrics_of_workers

    return metrics_of_workers(self, strategy)


def _is_inside():
    return (
        distributed_replica() is not None
        or thread_hooks.current_stateless_scope() is not None
    )


# That of all backends, which torch's trainer overrides from 3.16 on.
_neutral_metrics_result = [
    vars(cls)["get_metrics_result"]
    for cls in keras.Model.__mro__
    if "get_metrics_result" in vars(cls)
][-1]


def _require_unwrapped(model: keras.Model) -> None:
    """Raises where Keras wrapped a model of ours in a way that we do not know."""
    for name, value in vars(model).items():
        if isinstance(value, DistributedDataParallel):
            raise changed(
                "Model.make_train_function",
                f"wraps a model in DistributedDataParallel (Model.{name}), though it "
                "is the strategy that distributes it",
            )
