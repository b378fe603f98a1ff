"""Access to torch's own state and to a model's steps, for `keras_strategy.audit`."""

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_strategy.backends.torch.state import COMPONENTS, ShardedGradient
from keras_strategy.backends.torch.training import BatchFunction
from keras_strategy.core.protocols import AuditAdapter
from keras_strategy.keras_patches.internals import stored_value


class Adapter(AuditAdapter):
    def host_copy(self, x: Any) -> np.ndarray | None:
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        x = x.detach()
        if x.dtype is torch.bfloat16:
            x = x.float()
        return (x.to_dense() if x.is_sparse else x).cpu().numpy().copy()

    def tensor_restorer(self, x: Any) -> Callable[[], None] | None:
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        copy, gradient = x.detach().clone(), _copy_of_gradient(x)

        def restore():
            # Not by its version: batch normalizations write to it without a new one.
            if not torch.equal(x.detach(), copy):
                x.data.copy_(copy)
            if x.is_leaf:
                x.grad = gradient

        return restore

    def module_tensors(self, x: Any) -> Sequence[torch.Tensor]:
        is_module = isinstance(x, torch.nn.Module)
        return [*x.parameters(), *x.buffers()] if is_module else ()

    def stored_tensors(self, variable: Any) -> Sequence[torch.Tensor]:
        components = vars(variable).get(COMPONENTS)
        if components is None:
            return [stored_value(variable)]
        return components.all_tensors()

    def gradient_restorers(self, variable: Any) -> list[Callable[[], None]]:
        return [
            functools.partial(setattr, tensor, "grad", _copy_of_gradient(tensor))
            for tensor in self.stored_tensors(variable)
        ]

    def preserve_generators(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(range(torch.cuda.device_count()))

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        function = BatchFunction(model, kind, strategy)
        step, group = getattr(model, f"{kind}_step"), strategy.extended.group

        def step_on_device(batch):
            with torch.set_grad_enabled(kind == "train"):
                return step(group.arrays_to_tensors(copy.deepcopy(batch)))

        def step_on_replicas(batch):
            # Steps may write to their rows, as Keras does to weights with a mask.
            return function.run_batch(copy.deepcopy(batch))

        return step_on_replicas, step_on_device


def _copy_of_gradient(x: torch.Tensor) -> torch.Tensor | None:
    if not x.is_leaf or x.grad is None:
        return None
    # Nothing writes to a sharded one.
    is_sharded = isinstance(x.grad, ShardedGradient)
    return x.grad if is_sharded else x.grad.detach().clone()
