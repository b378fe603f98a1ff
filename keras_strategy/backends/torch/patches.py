"""Patches of Keras for torch, beside those of `keras_strategy/keras_patches`.

On torch, Keras writes to the variables in place. These patches separate what belongs to
one replica; `backends/threads/patches.py` has those that do not depend on torch.
"""

import functools
from typing import Any

import keras
import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from keras_strategy.backends.torch.collectives import initialized_workers
from keras_strategy.backends.torch.replica import (
    InPlaceReplica,
    TorchReplica,
)
from keras_strategy.backends.torch.sharding import (
    reading_leaves,
    unit_of,
)
from keras_strategy.core.context import distributed_replica
from keras_strategy.data.sources.indexed import IndexedRowReader
from keras_strategy.keras_patches import data_adapters
from keras_strategy.keras_patches.internals import (
    current_stateless_scope,
    stored_value,
)
from keras_strategy.keras_patches.losses_metrics import step_metrics_result
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_distributed_scope,
    in_replica,
    in_step,
    model_hook,
    multi_replica_only,
)
from keras_strategy.keras_patches.random import draws_for_local_rows, draws_from_seed
from keras_strategy.options import GLOBAL
from keras_strategy.training import ownership
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.row_weights import local_bounds
from keras_strategy.training.train_step import merge_worker_metrics

keras_random = find_module(
    "dropout torch_seed_generator", "keras.src.backend.torch.random"
)
TorchEpochIterator: Any = find_module(
    "TorchEpochIterator", "keras.src.backend.torch.trainer"
).TorchEpochIterator


@torch.no_grad()
def _sync_buffers(
    replica: TorchReplica,
    module: torch.nn.Module,
    buffers: dict[str, torch.Tensor],
    statistics: set[str],
) -> None:
    """Write the mean of the replicas' updated batch statistics to a module."""
    for name, buffer in module.named_buffers():
        if name not in statistics and not torch.equal(
            buffer, buffers[name].to(buffer.device)
        ):
            raise ValueError(
                f"The buffer '{name}' of a {type(module).__name__} changes when the "
                "module is called, so the replicas' values would differ. Only the "
                "statistics of torch's batch normalizations are synchronized. Store "
                "that state in a `keras.Variable` with an aggregation, or train on one "
                "device."
            )
    # A mean weighted by rows, like that of Keras's own layer.
    means = [
        name
        for name, buffer in buffers.items()
        if name in statistics and buffer.is_floating_point()
    ]
    weight = replica.step.row_weight
    if weight is None:
        weight = 1 / replica.topology.num_replicas
    sums = replica.weighted_sum([buffers[name] for name in means], weight)
    if replica.index == 0:  # it continues first, and no replica needs the old values
        buffers.update(zip(means, sums, strict=True))
        for name, buffer in module.named_buffers():
            if name in statistics:
                buffer.copy_(buffers[name])


# --- random numbers


@hook(
    keras_random,
    "dropout",
    "(inputs, rate, noise_shape=None, seed=None)",
    when=in_replica,
)
def _dropout(original, replica, inputs, rate, noise_shape=None, seed=None):
    """Draw from the replica's generator, not the process's, if there is no seed."""
    if draws_for_local_rows() is not None or replica.step.is_drawing:
        return original(inputs, rate, noise_shape, seed)
    if (
        draws_from_seed(seed, noise_shape)
        or inputs.device.type == "meta"
        or not 0 < rate < 1
    ):
        return original(inputs, rate, noise_shape, seed)
    keep, generator = 1.0 - rate, replica.generator(inputs.device)
    mask = torch.empty_like(inputs, requires_grad=False)
    return inputs * mask.bernoulli_(keep, generator=generator).div_(keep)


# --- layers


@hook(
    keras.Layer,
    ("_track_variables", "_post_track_variable"),
    ("self",),
    multi_replica_only=True,
)
def _track_tensors(original, self, *args):
    """Register the tensors with torch without reading them."""
    # The chief's values are written to them later, and sharded weights keep theirs.
    with ownership.without_broadcast(), reading_leaves():
        original(self, *args)


@multi_replica_only
def _sharded_weight(layer):
    """Return a sharded weight of a layer, or None."""
    sharded = (v for v in layer.variables if unit_of(v) is not None)
    return next(sharded, None)


@hook(keras.Layer, ("state_dict", "load_state_dict"), (), when=_sharded_weight)
def _state_dict(original, weight, self, *args, **kwargs):
    """Refuse to read or write sharded weights as torch's own, which are NaN."""
    raise RuntimeError(
        f"`{original.__name__}` of '{self.name}' needs whole tensors, but the strategy "
        f"shards its weights, such as '{weight.path}'. Use Keras's `save_weights` and "
        "`load_weights`, or `get_weights` and `set_weights`."
    )


@hook(keras.Layer, "zero_grad", "(self, set_to_none=True)", when=in_replica)
def _zero_grad(original, replica, self, set_to_none=True):
    """Clear this replica's gradients."""
    # torch would clear those of the first replica, from every replica's thread.
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
    """Compute with this replica's Parameters instead of the first replica's."""
    self.train(training is not False)
    module = self.module
    parts = module.named_modules() if module.training else ()
    norms = [(name, part) for name, part in parts if isinstance(part, _BatchNorm)]
    if norms and replica.context.strategy.batch_statistics == GLOBAL:
        name, norm = norms[0]
        raise ValueError(
            f"The strategy has batch_statistics='global', but the submodule "
            f"'{name}' of a {type(module).__name__} is torch's "
            f"{type(norm).__name__}, which normalizes with each replica's rows. "
            "Use `keras.layers.BatchNormalization`, or omit `batch_statistics`."
        )
    values = {id(stored_value(variable)): variable.value for variable in self.variables}
    parameters = {
        name: values.get(id(parameter), parameter)
        for name, parameter in module.named_parameters()
    }
    buffers = {
        name: buffer.detach().to(replica.scope.device, copy=True)
        for name, buffer in module.named_buffers()
    }
    outputs = functional_call(module, parameters | buffers, args, kwargs)
    if module.training and buffers:
        statistics = {
            f"{name}.{buffer}" if name else buffer
            for name, norm in norms
            for buffer, _ in norm.named_buffers(recurse=False)
        }
        _sync_buffers(replica, module, buffers, statistics)
    return outputs


# --- the trainer


@hook(TorchEpochIterator, "_get_iterator", "(self)", when=in_distributed_scope)
def _get_iterator(original, strategy, self):
    """Let several workers agree on their batches and read their local rows."""
    # Batches are prefetched where that is not observable. A model is built with a
    # global batch, as on one device.
    prefetch = functools.partial(
        data_adapters.read_ahead, self, scope=strategy.extended.group.scope
    )
    cluster = strategy.extended.cluster
    if cluster is None:
        return prefetch(original(self))
    to_split = strategy.num_replicas_in_sync > 1 and not data_adapters.is_building(self)
    if data_adapters.has_local_batches(self):
        local = len(strategy.extended.worker_devices)
        batches = data_adapters.join_batches(
            self, prefetch(original(self)), cluster, local, same_shapes=False
        )
        return batches if to_split else batches.as_read()
    batches = None
    if to_split:
        batches = data_adapters.read_local_rows(
            self.data_adapter,
            functools.partial(local_bounds, strategy.extended.topology),
            _HostBatches,
        )
        if isinstance(batches, IndexedRowReader):
            # torch's generator advances as by Keras's own loader.
            batches = DataLoader(
                _Stream(batches), batch_size=None, collate_fn=lambda batch: batch
            )
    batches = prefetch(original(self) if batches is None else batches)
    return data_adapters.synchronize(self, batches, cluster)


class _HostBatches:
    """The batches of an adapter's loader, as tensors in host memory."""

    def __init__(self, adapter):
        self._batches = adapter.get_torch_dataloader()

    def __iter__(self):
        # Not in `read`: the loader draws from torch's generator when it starts.
        batches = iter(self._batches)

        def read():
            with keras.device("cpu"):
                return next(batches, None)

        return iter(read, None)


class _Stream(IterableDataset):
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


# --- Keras's own distribution


def _strategy_or_workers(model: Any) -> Any:
    """Return a model's strategy; without one, the workers that a strategy connected."""
    strategy = strategy_of_model(model)
    if strategy is None and keras.distribution.distribution() is None:
        return initialized_workers()
    return strategy


if hasattr(keras.Model, "_initialize_ddp"):

    @model_hook("_initialize_ddp", "(self)", when=_strategy_or_workers)
    def _initialize_ddp(original, strategy, self):
        """Do nothing: a strategy distributes the model, or nothing does."""
        # Keras 3.16 wraps every model in DistributedDataParallel if torch.distributed
        # is initialised. It would broadcast the weights and sum the gradients a second
        # time, from every replica's thread; and a model outside of the scope, which
        # perhaps the chief alone trains, would wait for the other workers.


@model_hook("get_metrics_result", "(self)", when=_strategy_or_workers)
def _get_metrics_result(original, strategy, self):
    """Sum the states of all metrics in one collective, between our workers."""
    # Otherwise each state is a collective of its own, and Keras 3.16 sums them over all
    # processes if torch.distributed is initialised.
    if strategy_of_model(self) is None:
        return _base_metrics_result(self)
    replica = in_step()
    if replica is not None:
        return step_metrics_result(_base_metrics_result, replica, self)
    if (
        strategy.extended.cluster is None
        or distributed_replica() is not None
        or current_stateless_scope() is not None
    ):
        return _base_metrics_result(self)
    with torch.no_grad():
        return merge_worker_metrics(self, strategy.extended.group)


# The backend-independent method, which torch's trainer overrides since Keras 3.16.
_base_metrics_result = [
    vars(cls)["get_metrics_result"]
    for cls in keras.Model.__mro__
    if "get_metrics_result" in vars(cls)
][-1]
