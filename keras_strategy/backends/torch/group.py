"""The local replicas of a strategy, which run a function in turns."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch

from keras_strategy.backends.single import arrays_to_tensors
from keras_strategy.backends.threads import patches as thread_patches
from keras_strategy.backends.threads.pool import (
    KerasStep,
    ReplicaThreads,
    TurnScheduler,
)
from keras_strategy.backends.torch import state
from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.gradient_buckets import FlatBufferPool
from keras_strategy.backends.torch.replica import (
    PARTIAL_UPDATE_NOTE,
    InPlaceReplica,
    TorchReplica,
    returned_variable,
)
from keras_strategy.backends.torch.sharding import (
    ReplicaReads,
    WeightUnits,
    is_unit_complete,
    unit_of,
)
from keras_strategy.backends.torch.variables import MirroredVariable, retype
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import GroupAttributes
from keras_strategy.core.step_state import BatchRows
from keras_strategy.core.variable_components import ComponentGroup
from keras_strategy.devices import ReplicaTopology
from keras_strategy.keras_patches.internals import (
    byte_count,
    current_stateless_scope,
    stored_value,
)
from keras_strategy.keras_patches.sharded_slots import shard_adopted_slot
from keras_strategy.keras_patches.trainer import BATCH_LOGS, BatchLogs
from keras_strategy.training import ownership, reduction
from keras_strategy.training.sharding import FlatShards
from keras_strategy.training.train_step import find_batch_rows
from keras_strategy.training.variable_sync import average_statistics, is_sync_on_read
from keras_strategy.values import (
    DistributedValues,
    PerReplica,
    ReduceOp,
    is_numeric_array,
    map_leaves,
    regroup,
    select_replica,
)

# Calls inside calls, since Python limits their depth.
_MAX_NESTED = 8


class TorchGroup(ComponentGroup):
    def __init__(
        self, strategy: Any, devices: tuple[str, ...], workers: TorchWorkers | None
    ):
        self.strategy = strategy
        self.devices = devices
        self.torch_devices = tuple(torch_device(name) for name in devices)
        self.device_scopes: list[Callable[[], Any]] = [
            contextlib.nullcontext
            if device == "cpu"
            else functools.partial(torch.cuda.device, device)
            for device in self.torch_devices
        ]
        self.arrays_to_tensors: Callable[[Any], Any] = (
            functools.partial(map_leaves, cpu_tensor)
            if set(self.torch_devices) == {"cpu"}
            else arrays_to_tensors
        )
        self.workers = workers
        is_virtual = strategy.virtual_replicas is not None
        self.topology = ReplicaTopology(devices, workers, is_virtual)
        central = strategy.parameter_device
        home = central and torch_device(central)
        # The device of new variables, and of the results of cross-replica calls.
        self._device = home or self.torch_devices[0]
        self.layout = state.Layout(self.torch_devices, workers, self.topology, home)
        self.sum_logs = self.layout.sum_logs
        self._threads = ReplicaThreads(devices)
        self._attributes = GroupAttributes(self.strategy, len(devices), torch.is_tensor)
        self._lock = threading.Lock()
        self.buffers = FlatBufferPool()
        self.units = None
        if strategy.shard == "parameters" and self.topology.num_replicas > 1:
            self.units = WeightUnits(self.layout)

    def scope(self):
        return keras.device(self._device)

    def adopt(self, variables: Sequence[Any]) -> None:
        ownership.broadcast_from_chief(self.strategy, variables)
        for variable in variables:
            if not shard_adopted_slot(self.strategy, variable):
                state.get_or_create_components(variable, self.layout)

    def note_created(self, variable: Any) -> None:
        retype(variable, MirroredVariable)

    def note_initialized(self, variable: Any) -> None:
        """Register an initial value that the chief's replaces, or that is sharded."""
        if self.units is not None:
            # These do not wait for the end of the scope, where they might not fit.
            weights = [v for s, v in ownership.pending_values if s is self.strategy]
            if is_unit_complete([*weights, variable]):
                ownership.broadcast_pending_values()
        if self.workers is not None or self.units is not None:
            ownership.pending_values.append((self.strategy, variable))

    def initial_value(self, variable: Any) -> torch.Tensor:
        return stored_value(variable)

    @torch.no_grad()
    def set_initial_value(self, variable: Any, value: torch.Tensor) -> None:
        stored_value(variable).copy_(value)

    @contextlib.contextmanager
    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> Iterator[None]:
        kind = {"fit": "train", "evaluate": "test"}.get(method, method.split("_")[0])
        logs = vars(model).setdefault(BATCH_LOGS, {})
        logs.pop(kind, None)  # `train_on_batch` in a callback returns logs
        is_overridden = getattr(type(model), method) is not getattr(keras.Model, method)
        if method in ("fit", "evaluate") and not is_overridden:
            logs[kind] = BatchLogs(self.strategy.extended.cluster)
        try:
            yield
        finally:
            logs.pop(kind, None)

    def components(self, variable: Any) -> tuple[torch.Tensor, ...]:
        scope = current_stateless_scope()
        components = state.get_or_create_components(variable, self.layout)
        if isinstance(scope, thread_patches.MergedScope):
            tensors = scope.components(variable)
        else:
            components.refresh(variable)
            tensors = components.tensors
        if components.is_central:
            pairs = zip(tensors, self.torch_devices, strict=True)
            return tuple(tensor.detach().to(device) for tensor, device in pairs)
        return tuple(tensor.detach() for tensor in components.full_values(tensors))

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        central = self.strategy.parameter_device
        if central is not None and not is_sync_on_read(variable):
            return tuple(
                byte_count(variable) if device == central else 0
                for device in self.devices
            )
        components = vars(variable).get(state.COMPONENTS)
        if components is None or components.shards is None:
            owners = enumerate(self.layout.owners)
            size, on_read = byte_count(variable), is_sync_on_read(variable)
            return tuple(size if on_read or i == owner else 0 for i, owner in owners)
        return tuple(t.nbytes for t in components.tensors)

    def local_shards(self, variable: Any) -> list[tuple[int, torch.Tensor]]:
        components: Any = state.get_or_create_components(variable, self.layout)
        replicas = zip(self.topology.local_replicas, components.tensors, strict=True)
        return [
            (components.shards.bounds[replica][0], tensor.detach())
            for replica, tensor in replicas
            if tensor.numel()
        ]

    def shard_weights(self, variables: Sequence[Any]) -> None:
        """Shard new variables if the strategy shards its parameters."""
        if self.units is not None:
            self.units.shard(variables)

    def prepare_slot(self, weight: Any, sharding: Any) -> None:
        if self.units is not None:
            ownership.broadcast_pending_values()  # after which it is sharded
        unit = unit_of(weight)
        if unit is not None:
            unit.prepare_slot(weight, sharding)

    def local_summands(self, variable: Any) -> list[torch.Tensor]:
        components = state.get_or_create_components(variable, self.layout)
        return components.local_summands(variable)

    def share(self, variable: Any, shares: FlatShards) -> None:
        """Leave each replica its shard of an initialized variable."""
        state.ShardedComponents(variable, self.layout, shares)

    def assign_components(self, variable: Any, values: Sequence[torch.Tensor]) -> None:
        scope = current_stateless_scope()
        if isinstance(scope, thread_patches.MergedScope):
            scope.assign_components(variable, values)
        else:
            state.get_or_create_components(variable, self.layout).assign_each(values)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: Any,  # there is nothing to compile
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        # One run at a time: that of another Python thread waits.
        is_virtual = self.topology.sums_in_tree
        rounding = _reproducible_rounding if is_virtual else contextlib.nullcontext
        with scope(), self._lock, rounding():
            batch = find_batch_rows(args, kwargs)
            try:
                if len(self.devices) > 1:
                    return self._run_in_turns(fn, args, kwargs, batch)
                replica = InPlaceReplica(self, batch)
                if self.units is not None:
                    replica.unit_reads = ReplicaReads(self.units, replica, (), {})
                    fn = replica.unit_reads.track(fn)
                return replica.run(fn, args, kwargs)
            finally:
                if self.units is not None:
                    self.units.end_run()

    def call_once(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        is_virtual = self.topology.sums_in_tree
        rounding = _reproducible_rounding if is_virtual else contextlib.nullcontext
        with (
            self._lock,
            rounding(),
            context.device_step_scope(self.strategy),
            self.device_scopes[0](),
            keras.device(self.torch_devices[0]),
        ):
            args, kwargs = self.arrays_to_tensors((args, kwargs))
            return fn(*args, **kwargs)

    def _run_in_turns(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, batch: BatchRows | None
    ) -> Any:
        count = len(self.devices)
        turns = TurnScheduler(count)
        attributes = self._attributes.begin()
        replicas = [
            TorchReplica(self, index, turns, attributes[index], batch)
            for index in range(count)
        ]
        functions, sums = [fn] * count, {}
        if self.units is not None:
            scopes = [replica.scope for replica in replicas]
            for replica in replicas:
                replica.unit_reads = ReplicaReads(self.units, replica, scopes, sums)
            functions = [replica.unit_reads.track(fn) for replica in replicas]
        # Replicas have this thread's settings.
        settings, gradients = thread_patches.copy_settings(), torch.is_grad_enabled()

        @contextlib.contextmanager
        def entered(replica):
            index = replica.index
            with (
                thread_patches.applied_settings(settings),
                torch.set_grad_enabled(gradients),
                self.device_scopes[index](),
                keras.device(self.torch_devices[index]),
                context.replica_scope(replica.context),
                # The scope ends in the turn: layers then forget their losses.
                attributes[index].in_turn(),
                replica.scope,
            ):
                yield

        def call_function(replica):
            arguments = select_replica((args, kwargs), replica.index, count)
            with entered(replica):
                local_args, local_kwargs = self.arrays_to_tensors(arguments)
                return functions[replica.index](*local_args, **local_kwargs)

        def average(replica):
            with entered(replica):
                average_statistics(replica)

        def call_each(part):
            exchanges = fn.exchanges if isinstance(fn, KerasStep) else {}
            nests = exchanges.get(part.__name__, 2) == 1 and count <= _MAX_NESTED
            calls = [functools.partial(part, replica) for replica in replicas]
            results = self._threads.call(turns, calls, nests)
            if turns.has_threads:
                exchanges[part.__name__] = turns.exchanges[0]
            return results

        try:
            outputs = call_each(call_function)
            if any(replica.step.assigned for replica in replicas):
                call_each(average)
            outputs = regroup(
                outputs,
                torch.is_tensor,
                always_distributed=True,
                join_variables=functools.partial(returned_variable, replicas),
            )
            for replica in replicas:
                replica.scope.commit()
            thread_patches.keep_global_seed_generator(turns.seed_generator)
        except BaseException as error:
            self._roll_back(error, replicas)
            raise
        finally:
            sums.clear()  # the replicas are part of a reference cycle
        self._attributes.commit(attributes)
        replicas[0].scope.record_versions()
        return outputs

    def _roll_back(
        self, error: BaseException, replicas: Sequence[TorchReplica]
    ) -> None:
        """Make the components equal again that some replicas may have written."""
        changed: dict[int, Any] = {}
        for replica in replicas:
            changed.update(replica.scope.changed_in_place)
        for variable in changed.values():
            components = state.get_or_create_components(variable, self.layout)
            if components.shards is None:
                components.version = -1  # unknown
                components.refresh(variable)
        if changed:
            error.add_note(PARTIAL_UPDATE_NOTE)

    def reduce(
        self, reduce_op: ReduceOp, value: DistributedValues, axis: Any
    ) -> torch.Tensor:
        if not all(
            isinstance(component, torch.Tensor | int | float)
            or is_numeric_array(component)
            for component in value.values
        ):
            raise ValueError(
                "Only tensors and numbers can be reduced. Received a PerReplica value "
                f"of other types: {value!r}"
            )
        values = [reduction.cast_for_sum(v).to(self._device) for v in value.values]
        reduction.check_same_dtype(values)
        axes = reduction.axes_to_reduce(axis, [v.shape for v in values])
        sum_all = functools.partial(self.layout.sum, "strategy.reduce")
        total = sum_all([v.sum(dim=axes) if axes else v for v in values])
        if reduce_op is ReduceOp.SUM:
            return total
        if not axes:
            return total / self.topology.num_replicas
        counts = [reduction.num_entries(v.shape, axes) for v in values]
        return total / sum_all([torch.tensor(n, device=total.device) for n in counts])

    def gather(self, values: Sequence[Any], axis: int) -> torch.Tensor:
        joined = torch.cat(
            [keras.ops.convert_to_tensor(value).to(self._device) for value in values],
            dim=axis,
        )
        if self.workers is None:
            return joined
        return self.workers.gather("strategy.gather", joined, axis)[0]

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> PerReplica:
        return PerReplica(
            [
                _copy_to(part, device)
                for part, device in zip(parts, self.torch_devices, strict=True)
            ]
        )


@contextlib.contextmanager
def _reproducible_rounding() -> Iterator[None]:
    """Context manager in which torch's functions round alike in each process."""
    # A function without a deterministic kernel raises an error that names it. The
    # order of a sum depends on the number of threads. A replica's thread, which starts
    # in this context, keeps the number.
    settings: Any = torch.utils.deterministic
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        settings.fill_uninitialized_memory = fills
        torch.set_num_threads(threads)


def torch_device(name: str) -> str:
    kind, index = name.split(":")
    # torch would copy a tensor from "cpu" to "cpu:1", and a copy of a Parameter
    # has no gradient.
    return "cpu" if kind == "cpu" else f"cuda:{index}"


def cpu_tensor(leaf: Any) -> Any:
    """Convert a numeric array to a new tensor, without Keras's slow checks."""
    if type(leaf) is np.ndarray and _keeps_dtype(leaf.dtype):
        # A copy, as Keras makes, since a step may write to it.
        return torch.from_numpy(np.array(leaf))
    return keras.ops.convert_to_tensor(leaf) if is_numeric_array(leaf) else leaf


@functools.cache
def _keeps_dtype(dtype: np.dtype) -> bool:
    """Return True if Keras converts an array of this dtype to a tensor of it."""
    if dtype.kind not in "biufc":
        return False
    tensor = keras.ops.convert_to_tensor(np.zeros(1, dtype))
    return tensor.dtype == getattr(torch, dtype.name, None)


def _copy_to(part: Any, device: str) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        part = part.detach()
    elif device == "cpu":
        return torch.tensor(part)
    else:
        part = torch.as_tensor(part)
    on_host = part.device.type == "cpu" and part.layout == torch.strided
    # `pin_memory` does not copy pinned memory, which its owner may write again.
    if device == "cpu" or not on_host or part.is_pinned():
        return part.to(device, copy=True)
    return part.pin_memory().to(device, non_blocking=True)
