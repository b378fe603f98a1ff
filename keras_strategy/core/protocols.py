"""Protocols of a strategy and of a backend, for the layers below `strategies`.

A backend implements `Engine` once per process, `ReplicaGroup` for the devices of a
strategy, and `Replica` for one of them while a function runs on it. They contain only
what cannot be written once for all backends.
"""
# pyright: reportReturnType=false

import contextlib
import importlib
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from keras import ops

from keras_strategy.devices import LogicalDevices, ReplicaTopology
from keras_strategy.values import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster
    from keras_strategy.core.collectives import WorkerCollectives
    from keras_strategy.core.step_state import DryRun, StepState
    from keras_strategy.options import InputOptions, RunOptions


class Strategy(Protocol):
    """Part of `strategies.base.Strategy` that lower layers need."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def batch_statistics(self) -> str | None: ...

    @property
    def shard(self) -> str | None: ...

    @property
    def virtual_replicas(self) -> int | None: ...

    @property
    def logical_devices(self) -> LogicalDevices | None: ...

    @property
    def parameter_device(self) -> str | None: ...

    @property
    def is_chief(self) -> bool: ...

    @property
    def extended(self) -> "StrategyExtended": ...

    def scope(self) -> AbstractContextManager[Any]: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...

    def experimental_distribute_dataset(self, dataset: Any) -> Any: ...

    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any: ...

    def gather(self, value: Any, axis: int) -> Any: ...


class StrategyExtended(Protocol):
    """Part of `strategy.extended` that lower layers need."""

    assigned_in_run: Any
    checked_runs: int
    has_warned_drift: bool

    @property
    def group(self) -> "ReplicaGroup": ...

    @property
    def cluster(self) -> "Cluster | None":
        """The workers that train together; None for a single process."""

    @property
    def custom_reducer(self) -> Any:
        """Reduction by the user's `CrossDeviceOps`, or None."""

    @property
    def variables(self) -> MutableMapping[int, Any]:
        """Variables created in the scope, by `id`."""

    @property
    def topology(self) -> ReplicaTopology: ...

    @property
    def worker_devices(self) -> tuple[str, ...]: ...


class ReplicaGroup(Protocol):
    """The replicas of one strategy. With one device it adds nothing to Keras."""

    devices: tuple[str, ...]
    # Collectives between the processes; None for a single process.
    workers: "WorkerCollectives | None" = None
    # The `ReplicaContext` of the only replica; None if there are several.
    context: Any = None

    def scope(self) -> AbstractContextManager[Any]:
        """Context manager in which variables of this group are created."""

    def note_created(self, variable: Any) -> None:
        """Handle a new variable of this group, before Keras makes it."""

    def owns_native(self, variable: Any) -> bool | None:
        """Return whether a `tf.Variable` is this group's; None for anything else."""

    def adopt(self, variables: Sequence[Any]) -> None:
        """Mirror variables that were created outside the scope; keep their values."""

    def sync_initial_values(self, variables: Sequence[Any]) -> int:
        """Set new variables, in order, to the chief's values; return their number."""

    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Context manager around Keras's `fit` and so on; may change `arguments`."""

    def check_cross_replica_apply(self) -> None:
        """Raise RuntimeError if an optimizer cannot apply in cross-replica context."""

    def components(self, variable: Any) -> tuple[Any, ...]:
        """Return the component of `variable` on each local replica."""

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        """Return the bytes of `variable` on each local device."""

    def local_shards(
        self, variable: Any
    ) -> Sequence[tuple[tuple[int, ...] | int, Any]]:
        """Return the shards of a sharded variable that this worker writes."""
        # Each with where it begins: in each dimension, or in the flattened variable.

    def per_replica_value(self, variable: Any) -> DistributedValues:
        """Return the replicas' values of `variable`, in the form `reduce` takes."""

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        """Write a tensor of the variable's shape and dtype to each component."""

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Call `fn` for each component of `variable`, then write the results."""
        # Distributed values and variables among the arguments belong to this group. The
        # outputs have `Mirrored` in place of tensors; with one replica as they are.

    def mirror(self, value: Any) -> Mirrored:
        """Copy a tensor to each device."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: "RunOptions",
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """Call `fn` on every replica, and join the outputs by `values.regroup`."""
        # `scope` is entered while Python runs; a compiled program runs without it.
        # After an exception of `fn` the variables keep their old values, or a note on
        # the exception says that they do not.

    def call_once(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call `fn` as on one device; all replicas get what it assigns."""

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        """Combine tensors over the replicas, and over `axis` unless it is None."""

    def local_summands(self, variable: Any) -> Sequence[Any]:
        """Return each local replica's summand of a sync-on-read variable."""

    def sum_logs(self, logs: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """Sum several values over all replicas, given those of each local one."""

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        """Concatenate tensors of different devices on the first device."""

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        """Copy each replica's array to its device; return a `PerReplica`."""
        # The caller may overwrite `parts`. `alike` is True if their layouts are equal.


class Replica(Protocol):
    """One replica while a function runs on it."""

    devices: tuple[str, ...]
    # The state of its current training step.
    step: "StepState"
    # Index among all replicas, from 0.
    id: Any
    # Calls `fn(gradients)`, which updates variables, once for several replicas.
    share_update: Any = None

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        """Reduce over the replicas; the gradient of a sum is the sum of the gradients.

        In a training step, where the replica has a row weight w, the gradient is
        (sum over s of w_s * g_s) / w_r, since the optimizer applies the weight again.
        """

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate in replica order."""

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        """Implement `ReplicaContext.merge_call`."""

    def once(self, fn: Callable[[], Any]) -> Any:
        """Return the result of `fn`, which creates variables, called by one replica."""

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """Return the sum of weight * tensor over the replicas, without gradients."""
        # `weight` is this replica's row weight; None means 1. A weight of 0 adds zeros,
        # so that a NaN of a replica without rows does not spread.

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Return the random numbers of `draw`, the same on all replicas."""
        # `what` identifies the draw, by `==`. `skip` advances the generator instead,
        # where another replica of this process has drawn and its numbers are copied.
        return draw()

    def write(self, variable: Any, value: Any) -> None:
        """Set only this replica's component of `variable`."""


class AuditAdapter(Protocol):
    """Access to a backend's own state, and to a model's steps, for an audit."""

    # By default the backend has no state outside of Keras's variables.

    # True if gradients, losses and calls can be recorded.
    records_steps = True

    def first_rows(self, x: Any, rows: int) -> Any:
        """Return the first rows of an array or tensor, or all if there are fewer."""
        return x[:rows]

    def host_copy(self, x: Any) -> Any:
        """Return a copy of a tensor as a NumPy array; None if it has no value."""

    def tensor_restorer(self, x: Any) -> Callable[[], None] | None:
        """Return a function that restores the contents of a mutable tensor, or None."""
        return None

    def module_tensors(self, x: Any) -> Sequence[Any]:
        """Return the mutable tensors of a module of the backend's own, if it is one."""
        return ()

    def stored_tensors(self, variable: Any) -> Sequence[Any]:
        """Return the backend's objects that store a Keras variable."""
        return ()

    def gradient_restorers(self, variable: Any) -> list[Callable[[], None]]:
        """Return functions that restore gradients kept beside a Keras variable."""
        return []

    def preserve_generators(self) -> AbstractContextManager[Any]:
        """Context manager that restores the backend's other random generators."""
        return contextlib.nullcontext()

    def run_on_device(
        self, strategy: Any, fn: Callable[[], Any], variables: Sequence[Any]
    ) -> tuple[Any, list[Any] | None]:
        """Call `fn` as on one device; the user's code sees `strategy`."""
        # The result also has arrays of the variables afterwards, if these themselves do
        # not have the values.
        return strategy.extended.group.call_once(fn, (), {}), None

    def step_functions(
        self, model: Any, kind: str, strategy: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return a model's step on replicas and on one device, functions of a batch."""


class TimeFractions(NamedTuple):
    """Fractions of the time of several steps, and their number of collectives."""

    computing: float
    collecting: float
    collectives: int


@dataclass(frozen=True)
class PlannedStep:
    """A training step of one replica, for `plan`."""

    loss_of: Callable[[Any, Any, Any], tuple[Any, Any]]  # and outputs
    # The arguments of `loss_of` are values of these two, and inputs.
    weights: Sequence[Any]
    states: Sequence[Any]
    inputs: Callable[[int], Any]  # returns symbolic ones of so many rows
    rows: int
    optimizer: Any
    replicas: int
    shard: str | None = None


class Engine(Protocol):
    """One backend: its devices, gradients and replica groups."""

    # What a backend does not have returns None here.

    name: str

    def import_module(self, name: str) -> Any:
        """Import a module of the backend that few programs need."""
        return importlib.import_module(f"keras_strategy.backends.{self.name}.{name}")

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Return the local devices of a type; by default accelerators, or else CPUs."""

    # True if `fit` runs a step on each replica, even without virtual replicas.
    has_replicas_in_fit = True
    # True if gradients of sharded weights are reduced before an optimizer gets them.
    reduces_in_backward = False
    # True if a process can leave its workers and connect to others.
    can_disconnect = False

    def sharding_unsupported_reason(self, shard: str) -> str | None:
        """Return why `shard` is unsupported, and what works; None if supported."""

    def virtual_replicas_unsupported_reason(self) -> str | None:
        """Return why virtual replicas are unsupported; None if they are supported."""
        return (
            "its compiled programs round differently on another number of devices. Use "
            "KERAS_BACKEND=torch or jax."
        )

    def logical_devices_unsupported_reason(self) -> str | None:
        """Return why a replica has one device, and what works; None if several can."""

    def describe_arithmetic(self, is_virtual: bool) -> dict[str, Any]:
        """Return what decides the rounding of this process's computations."""
        # `is_virtual` tells that a strategy has virtual replicas.
        return {}

    def tpu_coordinates(self) -> list[tuple[int, int, int, int]] | None:
        """Return the mesh coordinates of the local TPU devices, in device order."""

    def set_logical_devices(self, device_type: str, count: int) -> None:
        """Split the machine's device; raise RuntimeError if devices are in use."""

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        """Make Keras place tensors and variables on `device`, a canonical name."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if `value` is a tensor of this backend."""

    def static_int(self, value: Any) -> int | None:
        """Return an integer that may be a tensor; None if a trace hides its value."""

    def memory_order(self, x: Any) -> tuple[int, ...] | None:
        """Return a tensor's axes in memory order; None if no draw depends on it."""

    def ones(self, shape: Sequence[Any], like: Any, order: Any) -> Any:
        """Return ones with the dtype and device of `like`, in a `memory_order`."""

    def draw_dropout_mask(
        self,
        replica: Replica,
        shape: Sequence[Any],
        axis: int,
        like: Any,
        order: Any,
        keep: float,
        seed: Any,
        is_seeded: bool,
    ) -> Any:
        """Draw the mask of Keras's dropout of such `ones`; None if only Keras can."""
        # `axis` is that of the batch. Entries of other processes' rows may be anything.

    def scale_kept(self, inputs: Any, mask: Any, keep: float, is_seeded: bool) -> Any:
        """Apply a dropout mask; `keep` is the probability of an element."""
        return ops.where(mask, inputs / keep, 0)

    def draw_slice(
        self, name: str, given: dict[str, Any], begin: Any, seed: Callable[[], Any]
    ) -> Any:
        """Draw one slice of a random tensor without drawing the rows before it."""
        # `name` is a function of `keras.random` and `given` its arguments, with the
        # global shape; for "dropout" the shape of the mask, the rate and the input's
        # dtype, and the slice is the mask of kept elements. It starts at row `begin`.
        # The result is None where the global tensor must be drawn.

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> "DryRun":
        """Dry-run a function as one device would, with `rows` rows in each tensor."""

    @property
    def audit(self) -> "AuditAdapter":
        """Access to the backend for `keras_strategy.audit`."""
        return self.import_module("training").StepAccess()

    @property
    def planner(self) -> Any:
        """Module for `plan`, of three functions."""
        # `without_memory` calls a function of which no tensor takes memory. In it,
        # `local_bytes` returns the bytes of weights and slots on the fullest device,
        # and `measure_step` the most that a step takes beside the variables.
        return self.import_module("costs")

    def copy_to(self, value: Any, device: str) -> Any:
        """Copy a tensor to `device`, unless it is there or a program decides it."""

    def sum_values(self, values: Sequence[Any], add: Any = None) -> Any:
        return sum(values[1:], values[0]) if add is None else add(values)

    def divide(self, total: Any, count: int) -> Any:
        return total / count

    def device_of(self, tensor: Any) -> str | None:
        """Return a tensor's canonical device name; None if a program decides it."""

    def is_tracing(self) -> bool:
        """Return True while Python is traced and tensors have no values."""

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """Implement `keras_strategy.value_and_grad`."""

    def make_step_function(
        self, strategy: Strategy, model: Any, kind: str, make: Callable[[], Any]
    ) -> Any:
        """Return the function of a batch for Keras's loop; `make` returns Keras's."""
        # `kind` is "train", "test" or "predict".

    def patch_modules(self) -> Sequence[ModuleType]:
        """Return the modules that patch Keras for this backend, in install order."""

    def random_state(self, seeded: bool = True) -> bytes | None:
        """Return the random generator's state; `seeded` seeds it if it has none."""

    def set_random_state(self, state: bytes) -> None:
        """Restore a state that `random_state` returned, on any worker."""

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        """Return Keras's own multi-device strategy, with a `scope()`, or None."""

    def native(self, name: str) -> Any:
        """Return tf.distribute's object of that name, or None on other backends."""

    def native_components(self, value: Any, is_mirrored: bool = True) -> Any:
        """Return the components of a native tf.distribute value; None for others."""
        # Also None for a mirrored variable, unless `is_mirrored`.

    def owns_native(self, variable: Any, native: Any = None) -> bool | None:
        """Return whether a `tf.Variable` is of `native`; None for anything else."""

    def distribute_natively(
        self,
        strategy: "Strategy",
        datasets: Sequence[Any],
        split: bool,
        options: "InputOptions | None",
    ) -> Any:
        """Return a `DistributedDataset` of this backend's own input pipeline."""
        # `datasets` is one `tf.data.Dataset`, or one for each replica. With `split` its
        # elements are global batches to split by rows; without, the replicas take
        # elements in turn. The result is None if this backend does not read them.

    def checkpoints(self, thing: Any, folder: Any, cluster: "Cluster | None") -> Any:
        """Return a handler of this backend's checkpoints, or None."""

    def profile(self, train: Callable[[int], None], steps: int) -> TimeFractions | None:
        """Return what a device of this worker does in training; None if unknown."""
        return self.import_module("costs").profile(train, steps)

    def require_eager_loop(self) -> None:
        """Raise RuntimeError where a loop over data would be compiled and unrolled."""

    def connect(self, cluster: "Cluster") -> None:
        """Connect this backend with other workers', before devices are listed."""

    def create_group(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: Any,
        cluster: "Cluster | None",
    ) -> "ReplicaGroup":
        """Create the replicas of `strategy`, one on each of the local devices."""
        # A backend that chooses its own collectives logs `cross_device_ops` as unused.
