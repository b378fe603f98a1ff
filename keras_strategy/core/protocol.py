"""All that an adapter must do, and nothing that the core can do for it.

`Engine` is one engine, once per process. `ReplicaGroup` is the set of devices of
one strategy on that engine. `Replica` is one of them while a function runs on it. What
connects the processes of a cluster is in `core/workers.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.values.distributed import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.context import Trial
    from keras_strategy.core.replica_context import ReplicaContext
    from keras_strategy.core.step_state import StepState
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.core.workers import Workers
    from keras_strategy.options.input import InputOptions
    from keras_strategy.options.run import RunOptions
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

    def random_state(self) -> bytes | None:
        """The state of the process's generator of random numbers, if there is one."""
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


class ReplicaGroup(Protocol):
    """The replicas of one strategy. With one device it adds nothing to Keras."""

    devices: tuple[str, ...]

    @property
    def workers(self) -> "Workers | None":
        """The processes that the replicas belong to; None for this one alone."""
        ...

    @property
    def context(self) -> "ReplicaContext | None":
        """The only replica's context, where there is only one."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """What must hold while variables of this group are made."""
        ...

    def adopt(self, variables: Sequence[Any]) -> None:
        """Mirrors variables that were made outside the scope, keeping values."""
        ...

    def take_first(self, variables: Sequence[Any]) -> int:
        """Gives variables that have got their first value the chief's.

        Returns:
            How many of them have it now, from the first one on: as many as all workers
            bring at this time.
        """
        ...

    def around(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """What must hold while Keras's own `fit`, or its like, works.

        Args:
            model: The model.
            method: "compile", "fit", "evaluate", "predict", or one of the three
                methods for a batch.
            arguments: Its arguments by name, to be changed in place.
        """
        ...

    def check_apply_outside_of_replicas(self) -> None:
        """Raises unless an optimizer can apply gradients in cross-replica context.

        Raises:
            RuntimeError: There.
        """
        ...

    def components(self, variable: Any) -> tuple[Any, ...]:
        """What each local replica holds of `variable`."""
        ...

    def bytes_of(self, variable: Any) -> tuple[int, ...]:
        """How many bytes of `variable` are on each local device."""
        ...

    def parts(self, variable: Any) -> DistributedValues:
        """What the replicas hold of `variable`, as `reduce` takes it."""
        ...

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        """Writes what each local replica holds of `variable`.

        Args:
            variable: A variable of this group.
            values: One tensor for each replica, of the variable's shape and dtype.
        """
        ...

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Calls `fn` for each component of `variable`, then writes them.

        Args:
            variable: A variable of this group.
            fn: Called with a `VariableComponent` and the arguments.
            args: Positional arguments; each component gets its part of distributed
                values, and of variables, which are all of this group.
            kwargs: Keyword arguments, likewise.

        Returns:
            What `fn` returned, with `Mirrored` in the place of tensors; with one
            replica, as it is.
        """
        ...

    def mirror(self, value: Any) -> Mirrored:
        """One copy of a tensor on each device."""
        ...

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: "RunOptions",
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """Calls `fn` on every replica, in replica context.

        Args:
            fn: The function.
            args: Its positional arguments, each a structure whose
                `DistributedValues` give every replica its component.
            kwargs: Its keyword arguments, likewise.
            options: Whether to compile it.
            scope: The strategy's, in which `fn` runs. A program that was compiled
                before runs no Python, and does without.

        Returns:
            The outputs, joined as `values.regroup` joins them.

        Raises:
            Exception: What `fn` raised in one replica. The variables are then as
                before, or the exception carries a note that they are not.
        """
        ...

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        """Combines tensors over the replicas, and over `axis` unless it is None."""
        ...

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        """Concatenates tensors of different devices on the first device."""
        ...

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        """Puts each replica's part of the data on its device.

        Args:
            parts: One array or tensor for each local replica, whose rows may differ.
                They are copied: whoever gave them may overwrite them.
            alike: Whether the parts of all replicas, those of other workers included,
                have the same shape and dtype; None if that is not known.

        Returns:
            A `PerReplica` of tensors; with one replica the tensor.

        Raises:
            TypeError: If this engine has no tensors of that dtype; or a ValueError.
        """
        ...


class LogicalGroup(ReplicaGroup, Protocol):
    """The group of replicas that have several devices each."""

    def lay_out(self, tensor: Any, parts: Sequence[int]) -> Any:
        """A tensor of a replica that its devices share, where a program computes.

        Args:
            tensor: The tensor.
            parts: Into how many parts each of its dimensions is split.

        Raises:
            ValueError: If a dimension cannot be split into as many.
        """
        ...


class Replica(Protocol):
    """One replica while a function runs on it.

    Attributes:
        devices: Canonical names of its devices.
        step: The state of the training step that it is in.
    """

    devices: tuple[str, ...]
    step: "StepState"

    @property
    def id(self) -> Any:
        """Its number among all replicas, from 0."""
        ...

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        """Differentiable: the gradient of a sum is the sum of the gradients.

        In a training step (where the replica has a row weight w) it is
        (sum over s of w_s * g_s) / w_r, since the optimizer weights it again.
        """
        ...

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenates in the order of the replicas."""
        ...

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        """See `ReplicaContext.merge_call`."""
        ...

    def once(self, fn: Callable[[], Any]) -> Any:
        """Calls `fn`, which makes variables for all replicas.

        The one that comes first calls it; those that come later find what it made.

        Returns:
            What `fn` returned.
        """
        ...

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """Sum over the replicas of weight * tensor, without gradients.

        Args:
            tensors: Tensors of the same shapes on every replica.
            weight: This replica's row weight; 0 selects zeros, so that a NaN of
                a replica without rows stays there. None means 1 everywhere.
        """
        ...

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Draws random numbers that all replicas draw alike.

        Args:
            what: Tells them from others, by `==`.
            draw: Draws them.
            skip: Advances what they are drawn from, in place of `draw`, where another
                replica of this process has drawn them and a copy is taken.

        Returns:
            What `draw` returned.
        """
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Sets this replica's component of `variable`, and no other's."""
        ...
