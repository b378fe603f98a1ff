"""All that an adapter must do of its engine, once per process.

What it does for the devices of one strategy is in `core/protocol.py`, and what connects
the processes of a cluster in `core/workers.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.core.protocol import ReplicaGroup

if TYPE_CHECKING:
    from keras_strategy.core.context import Trial
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.options.input import InputOptions
    from keras_strategy.workers.cluster import Cluster


class Engine(Protocol):
    """One engine: its devices, its gradients, its groups of replicas."""

    name: str

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Canonical names of the local devices.

        Args:
            device_type: "cpu", "gpu" or "tpu"; None means the accelerators, or
                the CPUs where there is none.
        """
        ...

    def refusal_of_shard(self, shard: str) -> str | None:
        """Why this engine does not split `shard`, and what works; None if it does."""
        ...

    def refusal_of_logical_devices(self) -> str | None:
        """Why replicas have one device each, and what works; None if they need not."""
        ...

    def coordinates_of_tpus(self) -> list[tuple[int, int, int, int]]:
        """Where the local TPU devices are in their mesh, in their order."""
        ...

    def set_logical_devices(self, device_type: str, count: int) -> None:
        """Divides the machine's device into `count` logical ones.

        Raises:
            RuntimeError: If devices are already in use.
        """
        ...

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        """Makes Keras put tensors and variables on `device`, a canonical name."""
        ...

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a tensor of this engine."""
        ...

    def number(self, value: Any) -> int | None:
        """A whole number that may be a tensor; None if it is not known by now."""
        ...

    def memory_order(self, x: Any) -> tuple[int, ...] | None:
        """A tensor's axes as they lie in memory; None where no draw depends on it."""
        ...

    def ones(self, shape: Sequence[Any], like: Any, order: Any) -> Any:
        """A tensor of ones.

        Args:
            shape: Its shape.
            like: A tensor whose dtype it gets, and where it is.
            order: See `memory_order`.
        """
        ...

    def draw_part(
        self, name: str, given: dict[str, Any], begin: Any, seed: Callable[[], Any]
    ) -> Any:
        """Draws random numbers from some place on, without those before.

        Args:
            name: The function of `keras.random`.
            given: Its arguments, with the shape of what is drawn; for "dropout" the
                shape of the mask, the rate and the dtype of what is dropped.
            begin: Where it begins in the first dimension of what one device draws.
            seed: Draws the seed.

        Returns:
            One device's numbers there, for "dropout" what is kept; None where all of
            them must be drawn.
        """
        ...

    def rehearse(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> "Trial":
        """Calls a function as on one device, see `hooks.rehearsal`.

        Args:
            fn: The function.
            args: Its positional arguments, whose tensors have the replica's rows.
            kwargs: Its keyword arguments, likewise.
            rows: How many rows it is called with in their place.

        Returns:
            What became known.
        """
        ...

    def copies_to_derive_by(
        self, variables: Sequence[Any], layers: Iterable[Any]
    ) -> AbstractContextManager[list[tuple[Any, Any]]]:
        """Surrounds a step whose gradients are looked at, and nothing else.

        What it writes to tensors of the engine's that are set on layers is undone, or
        it raises where that cannot be.

        Args:
            variables: Those that it derives by.
            layers: The model's layers.

        Yields:
            The variables with copies of what they hold, where an engine would write
            gradients to the variables themselves; otherwise nothing.
        """
        ...

    def copy_to(self, value: Any, device: str) -> Any:
        """A tensor on `device`, a canonical name; `value` itself if it is there.

        In a program that is being compiled for all replicas, `value` itself.
        """
        ...

    def device_of(self, tensor: Any) -> str | None:
        """The canonical name of a tensor's device; None if a program decides it."""
        ...

    def in_trace(self) -> bool:
        """Whether Python runs to be compiled, and tensors have no values yet."""
        ...

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """See `keras_strategy.value_and_grad`."""
        ...

    def hook_modules(self) -> Sequence[ModuleType]:
        """Where this engine extends Keras, in the order of installation."""
        ...

    def random_state(self, seeded: bool = True) -> bytes | None:
        """The state of the process's generator of random numbers, if there is one.

        Args:
            seeded: Whether a process without a seed gets one. What draws without a
                seed has no state otherwise.
        """
        ...

    def set_random_state(self, state: bytes) -> None:
        """Sets what `random_state` gave, on this worker or another."""
        ...

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        """What Keras offers for several devices by itself, to be compared with.

        Returns:
            Something with a `scope()` to make and train a model in, or None.
        """
        ...

    def native(self, name: str) -> Any:
        """What tf.distribute has under a name, if this is its engine; else None."""
        ...

    def native_components(self, value: Any) -> tuple[Any, ...] | None:
        """What a distributed value of native tf.distribute holds, None of others."""
        ...

    def distribute_natively(
        self,
        strategy: "Strategy",
        datasets: Sequence[Any],
        split: bool,
        options: "InputOptions | None",
    ) -> Any:
        """Distributes datasets with this engine's own input pipeline.

        Args:
            strategy: The strategy.
            datasets: What the user gave: one dataset, or one for each replica.
            split: Whether its elements are global batches, to be split by rows;
                else the replicas take them in turn.
            options: The user's options, or None.

        Returns:
            A `DistributedDataset`; None if a dataset is not one of this engine's.
        """
        ...

    def checkpoints(self, thing: Any, folder: Any, cluster: "Cluster | None") -> Any:
        """Saves and restores this engine's own kind of checkpoint.

        Args:
            thing: What the user wants saved.
            folder: Where, or None.
            cluster: The workers, or None.

        Returns:
            An object with `restore()` and `save(steps)`, where `restore` gives the
            steps that were saved; None if `thing` is none of its kind.
        """
        ...

    def count(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[int, int, int, int]:
        """Counts what this engine does while a program trains.

        Args:
            train: Trains for so many steps.
            steps: How many.

        Returns:
            The collectives, the bytes that one replica gives to them, the programs
            that were compiled, and the copies between host and devices.
        """
        ...

    def shares(
        self, train: Callable[[int], None], steps: int
    ) -> tuple[float, float] | None:
        """The shares of the time in which a device computed, and was in collectives.

        Args:
            train: See `count`.
            steps: See `count`.

        Returns:
            What this engine's profiler says; None where it says nothing.
        """
        ...

    def require_loop_in_python(self) -> None:
        """Raises where a Python loop over data would be compiled, and unrolled.

        Raises:
            RuntimeError: There.
        """
        ...

    def connect(self, cluster: "Cluster") -> None:
        """Connects the engine with those of the other workers.

        Called before any device is asked for; what this worker's devices are may
        depend on it.

        Raises:
            RuntimeError: If the engine is in use already, or belongs to others.
        """
        ...

    def create_group(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: Any,
        cluster: "Cluster | None",
    ) -> "ReplicaGroup":
        """The replicas of `strategy`, one on each of `devices`.

        Args:
            strategy: The strategy.
            devices: Canonical names of the local devices, one replica each.
            cross_device_ops: A `CrossDeviceOps` of those that are a choice alone, or
                None. An engine that decides by itself says so in the log.
            cluster: The workers, to which the engine is connected, or None.
        """
        ...
