"""Protocols of a strategy and of a backend, for the layers below `strategies`.

A backend implements `Engine` once per process, `ReplicaGroup` for the devices of a
strategy, and `Replica` for one of them while a function runs on it. They contain only
what cannot be written once for all backends. `core.collectives` has the collectives
between processes.
"""
# ruff: noqa: D102 (strategies/base.py and extended.py document their methods)
# pyright: reportReturnType=false

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.devices import LogicalDevices, ReplicaTopology
from keras_strategy.values import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster
    from keras_strategy.core.collectives import WorkerCollectives
    from keras_strategy.core.step_state import DryRun, StepState
    from keras_strategy.options import InputOptions, RunOptions


class Strategy(Protocol):
    """The interface of a strategy; `strategies.base.Strategy` documents it."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def batch_statistics(self) -> str | None: ...

    @property
    def shard(self) -> str | None: ...

    @property
    def logical_devices(self) -> LogicalDevices | None: ...

    @property
    def parameter_device(self) -> str | None: ...

    @property
    def extended(self) -> "StrategyExtended": ...

    def scope(self) -> AbstractContextManager[Any]: ...

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        options: "RunOptions | None" = None,
    ) -> Any: ...

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: Any = None
    ) -> Any: ...

    def gather(self, value: Any, axis: int) -> Any: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...


class StrategyExtended(Protocol):
    """The interface of `strategy.extended`."""

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

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any: ...


class ReplicaGroup(Protocol):
    """The replicas of one strategy. With one device it adds nothing to Keras."""

    devices: tuple[str, ...]

    @property
    def workers(self) -> "WorkerCollectives | None":
        """Collectives between the processes; None for a single process."""

    @property
    def context(self) -> Any:
        """The `ReplicaContext` of the only replica; None if there are several."""

    def scope(self) -> AbstractContextManager[Any]:
        """Context manager in which variables of this group are created."""

    def adopt(self, variables: Sequence[Any]) -> None:
        """Mirror variables that were created outside the scope; keep their values."""

    def sync_initial_values(self, variables: Sequence[Any]) -> int:
        """Set variables that got their initial values to the chief's.

        Returns:
            How many of them, from the first on, are synchronised: the number that all
            workers have initialised by now.
        """

    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Context manager around Keras's own `compile`, `fit`, `*_on_batch` and so on.

        It may change `arguments`, the method's arguments by name, in place.
        """

    def check_cross_replica_apply(self) -> None:
        """Raise if an optimizer cannot apply gradients in cross-replica context.

        Raises:
            RuntimeError: If it cannot.
        """

    def components(self, variable: Any) -> tuple[Any, ...]:
        """Return the component of `variable` on each local replica."""

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        """Return the bytes of `variable` on each local device."""

    def per_replica_value(self, variable: Any) -> DistributedValues:
        """Return the replicas' values of `variable`, in the form `reduce` takes."""

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        """Write a tensor of the variable's shape and dtype to each component."""

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Call `fn` for each component of `variable`, then write the results.

        Args:
            variable: A variable of this group.
            fn: Called with a `VariableComponent` and the arguments.
            args: Positional arguments. Each component gets its component of distributed
                values and of variables, which all belong to this group.
            kwargs: Keyword arguments, likewise.

        Returns:
            The outputs, with `Mirrored` in place of tensors; with one replica
            unchanged.
        """

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
        """Call `fn` on every replica, in replica context.

        Args:
            fn: The function.
            args: Positional arguments, each a structure whose `DistributedValues` give
                every replica its component.
            kwargs: Keyword arguments, likewise.
            options: The run options.
            scope: The strategy's scope, entered while Python runs. A compiled program
                runs without it.

        Returns:
            The outputs, joined by `values.regroup`.

        Raises:
            Exception: As raised by `fn` in one replica. The variables keep their old
                values, or a note on the exception says that they do not.
        """

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        """Combine tensors over the replicas, and over `axis` unless it is None."""

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        """Concatenate tensors of different devices on the first device."""

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        """Copy each replica's data to its device.

        Args:
            parts: One array or tensor for each local replica; the rows may differ. They
                are copied, so the caller may overwrite them.
            alike: True if the parts of all replicas have the same shape and dtype;
                None if unknown.

        Returns:
            A `PerReplica` of tensors; with one replica the tensor.

        Raises:
            TypeError: If the backend has no tensors of that dtype; or a ValueError.
        """


class LogicalGroup(ReplicaGroup, Protocol):
    """Replica group whose replicas have several devices each."""

    def shard_tensor(self, tensor: Any, parts: Sequence[int]) -> Any:
        """Shard a replica's tensor over its devices, in `parts` per dimension.

        Raises:
            ValueError: If a dimension cannot be split into that many parts.
        """


class Replica(Protocol):
    """One replica while a function runs on it.

    Attributes:
        devices: Canonical names of its devices.
        step: The state of its current training step.
    """

    devices: tuple[str, ...]
    step: "StepState"

    @property
    def id(self) -> Any:
        """Index among all replicas, from 0."""

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
        """Call `fn`, which creates variables, once for all replicas.

        The first replica calls it; later ones get the same result.
        """

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """Return the sum of weight * tensor over the replicas, without gradients.

        Args:
            tensors: Tensors of the same shapes on every replica.
            weight: This replica's row weight; None means 1. A weight of 0 adds zeros,
                so that a NaN of a replica without rows does not spread.
        """

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Draw random numbers that are the same on all replicas.

        Args:
            what: Identifies the draw, by `==`.
            draw: Draws the numbers.
            skip: Advances the generator instead of `draw`, where another replica of
                this process has drawn and its numbers are copied.

        Returns:
            The result of `draw`.
        """

    def write(self, variable: Any, value: Any) -> None:
        """Set only this replica's component of `variable`."""


class Engine(Protocol):
    """One backend: its devices, gradients and replica groups."""

    name: str

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Return the canonical names of the local devices.

        Args:
            device_type: "cpu", "gpu" or "tpu"; None means the accelerators, or the CPUs
                where there is none.
        """

    def sharding_unsupported_reason(self, shard: str) -> str | None:
        """Return why `shard` is unsupported, and what works; None if supported."""

    def logical_devices_unsupported_reason(self) -> str | None:
        """Return why a replica has one device, and what works; None if several can."""

    def tpu_coordinates(self) -> list[tuple[int, int, int, int]]:
        """Return the mesh coordinates of the local TPU devices, in device order."""

    def set_logical_devices(self, device_type: str, count: int) -> None:
        """Split the machine's device into `count` logical devices.

        Raises:
            RuntimeError: If devices are already in use.
        """

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

    def draw_slice(
        self, name: str, given: dict[str, Any], begin: Any, seed: Callable[[], Any]
    ) -> Any:
        """Draw one slice of a random tensor without drawing the rows before it.

        Args:
            name: The function of `keras.random`.
            given: Its arguments, with the global shape. For "dropout": the shape of the
                mask, the rate and the dtype of the input.
            begin: First row of the slice within the global shape.
            seed: Draws the seed.

        Returns:
            The slice, for "dropout" the mask of kept elements; None where the global
            tensor must be drawn.
        """

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> "DryRun":
        """Dry-run a function as one device would run it, with `rows` rows.

        Args:
            fn: The function.
            args: Positional arguments, whose tensors have the replica's rows.
            kwargs: Keyword arguments, likewise.
            rows: The number of rows to pass instead.
        """

    def gradient_variable_copies(
        self, variables: Sequence[Any], layers: Iterable[Any]
    ) -> AbstractContextManager[list[tuple[Any, Any]]]:
        """Context manager around a dry-run step of which only the gradients are used.

        It undoes what the step writes to the backend's own tensors on layers, or raises
        where it cannot.

        Args:
            variables: The variables to differentiate by.
            layers: The model's layers.

        Yields:
            Pairs of a variable and a copy of its value, where a backend would write
            gradients to the variables themselves; otherwise an empty list.
        """

    def copy_to(self, value: Any, device: str) -> Any:
        """Copy a tensor to `device`; return `value` itself if it is there.

        Also returns `value` itself in a program that is compiled for all replicas.
        """

    def device_of(self, tensor: Any) -> str | None:
        """Return a tensor's canonical device name; None if a program decides it."""

    def is_tracing(self) -> bool:
        """Return True while Python is traced and tensors have no values."""

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """Implement `keras_strategy.value_and_grad`."""

    def patch_modules(self) -> Sequence[ModuleType]:
        """Return the modules that patch Keras for this backend, in install order."""

    def random_state(self, seeded: bool = True) -> bytes | None:
        """Return the state of the process's random generator, if there is one.

        Args:
            seeded: True to seed an unseeded generator first: without a seed it has no
                state.
        """

    def set_random_state(self, state: bytes) -> None:
        """Restore a state that `random_state` returned, on any worker."""

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        """Return Keras's own multi-device strategy, for comparison, or None.

        It has a `scope()` in which a model is built and trained.
        """

    def native(self, name: str) -> Any:
        """Return tf.distribute's object of that name, or None on other backends."""

    def native_components(self, value: Any) -> tuple[Any, ...] | None:
        """Return the components of a native tf.distribute value; None for others."""

    def distribute_natively(
        self,
        strategy: "Strategy",
        datasets: Sequence[Any],
        split: bool,
        options: "InputOptions | None",
    ) -> Any:
        """Distribute datasets with this backend's own input pipeline.

        `datasets` is one dataset, or one for each replica. With `split` its elements
        are global batches to split by rows; without, the replicas take elements in
        turn.

        Returns:
            A `DistributedDataset`; None if a dataset is not of this backend.
        """

    def checkpoints(self, thing: Any, folder: Any, cluster: "Cluster | None") -> Any:
        """Return a handler for this backend's own kind of checkpoint.

        It has `restore()`, which returns the number of saved steps, and `save(steps)`.
        None if `thing` is not such a checkpoint.
        """

    def count_operations(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[int, int, int, int]:
        """Count this backend's operations while `train(steps)` runs.

        Returns:
            The collectives, the bytes of one replica in them, the compiled programs,
            and the copies between host and devices.
        """

    def compute_and_comm_fractions(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[float, float] | None:
        """Profile `train(steps)`.

        Returns:
            The fractions of the time in which a device computes and in which it is in
            collectives; None if the backend's profiler does not report them.
        """

    def require_eager_loop(self) -> None:
        """Raise where a Python loop over data would be compiled and unrolled.

        Raises:
            RuntimeError: In such a place.
        """

    def connect(self, cluster: "Cluster") -> None:
        """Connect this backend with those of the other workers.

        Called before devices are listed, since the local devices may depend on it.

        Raises:
            RuntimeError: If the backend is in use already, or connected to others.
        """

    def create_group(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: Any,
        cluster: "Cluster | None",
    ) -> "ReplicaGroup":
        """Create the replicas of `strategy`, one on each of the local devices.

        A backend that chooses its collectives by itself logs that `cross_device_ops`,
        one of tf.distribute's, has no effect. `cluster` is connected already.
        """
