"""Modules of torch's own, which a replica calls with its own tensors."""

from typing import Any

import torch
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.hooks.variables import stored
from keras_strategy.options.batch_statistics import GLOBAL


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
