"""Protocol of a backend: what each adapter does once per process.

`core/protocol.py` has the protocols of its replicas, `core/workers.py` the collectives
between processes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.core.protocol import ReplicaGroup

if TYPE_CHECKING:
    from keras_strategy.core.context import DryRun
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.options.input import InputOptions
    from keras_strategy.workers.cluster import Cluster


class Engine(Protocol):
    """One backend: its devices, gradients and replica groups."""

    name: str

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Return the canonical names of the local devices.

        Args:
            device_type: "cpu", "gpu" or "tpu"; None means the accelerators, or the CPUs
                where there is none.
        """
        ...

    def sharding_unsupported_reason(self, shard: str) -> str | None:
        """Return why `shard` is unsupported, and what works; None if supported."""
        ...

    def logical_devices_unsupported_reason(self) -> str | None:
        """Return why a replica has one device, and what works; None if several can."""
        ...

    def tpu_coordinates(self) -> list[tuple[int, int, int, int]]:
        """Return the mesh coordinates of the local TPU devices, in device order."""
        ...

    def set_logical_devices(self, device_type: str, count: int) -> None:
        """Split the machine's device into `count` logical devices.

        Raises:
            RuntimeError: If devices are already in use.
        """
        ...

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        """Make Keras place tensors and variables on `device`, a canonical name."""
        ...

    def is_tensor(self, value: Any) -> bool:
        """Return True if `value` is a tensor of this backend."""
        ...

    def static_int(self, value: Any) -> int | None:
        """Return an integer that may be a tensor; None if a trace hides its value."""
        ...

    def memory_order(self, x: Any) -> tuple[int, ...] | None:
        """Return a tensor's axes in memory order; None if no draw depends on it."""
        ...

    def ones(self, shape: Sequence[Any], like: Any, order: Any) -> Any:
        """Return a tensor of ones.

        Args:
            shape: Its shape.
            like: A tensor that gives the dtype and the device.
            order: The memory order, see `memory_order`.
        """
        ...

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
        ...

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> "DryRun":
        """Dry-run a function as one device would run it, see `hooks.rehearsal`.

        Args:
            fn: The function.
            args: Positional arguments, whose tensors have the replica's rows.
            kwargs: Keyword arguments, likewise.
            rows: The number of rows to call it with instead.
        """
        ...

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
        ...

    def copy_to(self, value: Any, device: str) -> Any:
        """Copy a tensor to `device`; return `value` itself if it is there.

        Also returns `value` itself in a program that is compiled for all replicas.
        """
        ...

    def device_of(self, tensor: Any) -> str | None:
        """Return a tensor's canonical device name; None if a program decides it."""
        ...

    def is_tracing(self) -> bool:
        """Return True while Python is traced and tensors have no values."""
        ...

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """Implement `keras_strategy.value_and_grad`."""
        ...

    def patch_modules(self) -> Sequence[ModuleType]:
        """Return the modules that patch Keras for this backend, in install order."""
        ...

    def random_state(self, seeded: bool = True) -> bytes | None:
        """Return the state of the process's random generator, if there is one.

        Args:
            seeded: True to seed an unseeded generator first: without a seed it has no
                state.
        """
        ...

    def set_random_state(self, state: bytes) -> None:
        """Restore a state that `random_state` returned, on any worker."""
        ...

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        """Return Keras's own multi-device strategy, for comparison, or None.

        It has a `scope()` in which a model is built and trained.
        """
        ...

    def native(self, name: str) -> Any:
        """Return tf.distribute's object of that name, or None on other backends."""
        ...

    def native_components(self, value: Any) -> tuple[Any, ...] | None:
        """Return the components of a native tf.distribute value; None for others."""
        ...

    def distribute_natively(
        self,
        strategy: "Strategy",
        datasets: Sequence[Any],
        split: bool,
        options: "InputOptions | None",
    ) -> Any:
        """Distribute datasets with this backend's own input pipeline.

        Args:
            strategy: The strategy.
            datasets: One dataset, or one for each replica.
            split: True if elements are global batches to split by rows; False if the
                replicas take elements in turn.
            options: The user's options, or None.

        Returns:
            A `DistributedDataset`; None if a dataset is not of this backend.
        """
        ...

    def checkpoints(self, thing: Any, folder: Any, cluster: "Cluster | None") -> Any:
        """Return a handler for this backend's own kind of checkpoint.

        Args:
            thing: The object to save.
            folder: The folder, or None.
            cluster: The workers, or None.

        Returns:
            An object with `restore()`, which returns the number of saved steps, and
            `save(steps)`; None if `thing` is of another kind.
        """
        ...

    def count_operations(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[int, int, int, int]:
        """Count this backend's operations while `train(steps)` runs.

        Returns:
            The collectives, the bytes of one replica in them, the compiled programs,
            and the copies between host and devices.
        """
        ...

    def compute_and_comm_fractions(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[float, float] | None:
        """Profile `train(steps)`.

        Returns:
            The fractions of the time in which a device computes and in which it is in
            collectives; None if the backend's profiler does not report them.
        """
        ...

    def require_eager_loop(self) -> None:
        """Raise where a Python loop over data would be compiled and unrolled.

        Raises:
            RuntimeError: In such a place.
        """
        ...

    def connect(self, cluster: "Cluster") -> None:
        """Connect this backend with those of the other workers.

        Called before devices are listed, since the local devices may depend on it.

        Raises:
            RuntimeError: If the backend is in use already, or connected to others.
        """
        ...

    def create_group(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: Any,
        cluster: "Cluster | None",
    ) -> "ReplicaGroup":
        """Create the replicas of `strategy`, one on each device.

        Args:
            strategy: The strategy.
            devices: Canonical names of the local devices, one replica each.
            cross_device_ops: One of tf.distribute's `CrossDeviceOps`, or None. A
                backend that chooses by itself logs that it has no effect.
            cluster: The connected workers, or None.
        """
        ...
