"""The torch backend: the devices of this process in turns.

torch has one CPU device with all cores. A logical CPU is one more name of it: replicas
on several of them share the cores.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.backends.threads import patches as thread_patches
from keras_strategy.backends.torch import (
    collectives,
    patches,
    patches_compiled,
    patches_optimizers,
    random,
    training,
    variables,
)
from keras_strategy.backends.torch.group import TorchGroup, torch_device
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.context import DryRun
from keras_strategy.core.protocols import Engine
from keras_strategy.core.step_state import map_rows
from keras_strategy.devices import canonical_device
from keras_strategy.keras_patches import sharded_slots, sharded_updates
from keras_strategy.keras_patches.random import dry_running
from keras_strategy.values import DistributedValues, raise_not_a_tensor

_thread_state = threading.local()

# Keras converts unknown objects with NumPy.
_protocol: Any = DistributedValues
_protocol.__array__ = raise_not_a_tensor


class TorchEngine(Engine):
    name = "torch"
    memory_order: Any = staticmethod(random.memory_order)
    scale_kept: Any = staticmethod(random.scale_kept)
    is_tensor: Any = staticmethod(torch.is_tensor)
    static_int: Any = staticmethod(int)
    connect: Any = staticmethod(collectives.connect)
    reduces_in_backward = True
    can_disconnect = True
    _logical_cpus = 1
    _is_in_use = False  # by a strategy, so that the number of devices is final

    def list_devices(self, device_type: str | None = None) -> list[str]:
        counts = {
            "gpu": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "cpu": self._logical_cpus,
        }
        kind = (device_type or ("gpu" if counts["gpu"] else "cpu")).lower()
        return [f"{kind}:{index}" for index in range(counts.get(kind, 0))]

    def virtual_replicas_unsupported_reason(self) -> str | None:
        return None

    def describe_arithmetic(self, is_virtual: bool) -> dict[str, Any]:
        if torch.cuda.is_available():
            return {"GPU": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}
        return {
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": 1 if is_virtual else torch.get_num_threads(),
        }

    def logical_devices_unsupported_reason(self) -> str:
        return (
            "torch has no replicas of several devices, and its TPUs are not supported. "
            "Use KERAS_BACKEND=jax, or `MirroredStrategy` here."
        )

    def set_logical_devices(self, device_type: str, count: int) -> None:
        if count != self._logical_cpus and self._is_in_use:
            raise RuntimeError(
                "set_logical_devices must be called before a strategy is created. "
                f"There are {self._logical_cpus} logical CPU devices now; received "
                f"{count}. Call it at the start of the program, or restart the "
                "notebook's kernel."
            )
        self._logical_cpus = count

    def device_scope(self, device: str):
        return keras.device(torch_device(device))

    def ones(
        self, shape: Sequence[Any], like: torch.Tensor, order: Sequence[int]
    ) -> torch.Tensor:
        make = functools.partial(torch.ones, dtype=like.dtype, device=like.device)
        return random.make_in_order(make, shape, order)

    def draw_dropout_mask(
        self,
        replica: Any,
        shape: Sequence[Any],
        axis: int,
        like: torch.Tensor,
        order: Sequence[int],
        keep: float,
        seed: Any,
        is_seeded: bool,
    ) -> torch.Tensor | None:
        if like.device.type != "cpu" or not random.draws_like_torch():
            return None
        rows, part = replica.step.rows, None
        # Other replicas of this process need all rows.
        is_alone = len(replica.topology.local_replicas) == 1
        if is_alone and axis == (0 if is_seeded else order[0]):
            part = rows.begin, rows.begin + rows.count, rows.total
        if is_seeded:
            generator = patches.keras_random.torch_seed_generator(seed)
            return random.draw_mask(shape, keep, generator, True, part)
        draw = functools.partial(random.draw_mask, keep=keep, part=part)
        return random.make_in_order(draw, shape, order)

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> DryRun:
        def repeat_rows(x):
            return x[[row % len(x) for row in range(rows)]]

        args, kwargs = map_rows(repeat_rows, (args, kwargs))
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        # A gradient ends the dry run, and the process's generators are restored.
        with torch.random.fork_rng(cuda), torch.no_grad(), dry_running() as result:
            fn(*args, **kwargs)
        return result

    def copy_to(self, value: Any, device: str) -> torch.Tensor:
        target = torch_device(device)
        with keras.device(target):
            return keras.ops.convert_to_tensor(value).to(target)

    def device_of(self, tensor: torch.Tensor) -> str:
        return canonical_device(str(tensor.device))

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        def value_and_gradients(*args, **kwargs):
            # The result of a nested call, such as a penalty, is differentiated, too.
            is_nested = getattr(_thread_state, "is_differentiating", False)
            _thread_state.is_differentiating = True
            try:
                with torch.enable_grad():
                    output = fn(*args, **kwargs)
                    value = output[0] if has_aux else output
                    if not isinstance(value, torch.Tensor) or value.numel() != 1:
                        raise ValueError(
                            "Argument `fn` must return a scalar tensor to differentiate"
                            + (", and auxiliary outputs after it" if has_aux else "")
                            + f". Received: {value!r}"
                        )
                    gradients = torch.autograd.grad(
                        value,
                        [v.value for v in variables],
                        create_graph=is_nested,
                        allow_unused=True,
                    )
            finally:
                _thread_state.is_differentiating = is_nested
            if not is_nested:
                output = tree.map_structure(
                    lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output
                )
            return output, list(gradients)

        return value_and_gradients

    make_step_function: Any = staticmethod(training.make_step_function)

    def patch_modules(self) -> Sequence[ModuleType]:
        variables.check_keras()
        return [
            thread_patches,
            patches,
            patches_compiled,
            patches_optimizers,
            sharded_slots,
            sharded_updates,
        ]

    def create_group(
        self,
        strategy: Any,
        names: tuple[str, ...],
        cross_device_ops: Any,
        cluster: Cluster | None,
    ) -> TorchGroup:
        if cross_device_ops is not None:
            cross_device_ops.log_no_effect("torch")
        self._is_in_use = True
        workers = None if cluster is None else collectives.connect(cluster)
        return TorchGroup(strategy, names, workers)
