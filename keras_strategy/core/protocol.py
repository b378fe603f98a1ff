"""Protocols of a backend's replicas: only what `core` cannot do for all backends.

`ReplicaGroup` is the set of devices of one strategy, `Replica` one of them while a
function runs on it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.values.distributed import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.step_state import StepState
    from keras_strategy.core.workers import WorkerCollectives
    from keras_strategy.options.run import RunOptions


class ReplicaGroup(Protocol):
    """The replicas of one strategy. With one device it adds nothing to Keras."""

    devices: tuple[str, ...]

    @property
    def workers(self) -> "WorkerCollectives | None":
        """Collectives between the processes; None for a single process."""
        ...

    @property
    def context(self) -> Any:
        """The `ReplicaContext` of the only replica; None if there are several."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Context manager in which variables of this group are created."""
        ...

    def adopt(self, variables: Sequence[Any]) -> None:
        """Mirror variables that were created outside the scope; keep their values."""
        ...

    def sync_initial_values(self, variables: Sequence[Any]) -> int:
        """Set variables that got their initial values to the chief's.

        Returns:
            How many of them, from the first on, are synchronised: the number that all
            workers have initialised by now.
        """
        ...

    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Context manager around Keras's own `fit`, `evaluate` and the like.

        Args:
            model: The model.
            method: "compile", "fit", "evaluate", "predict", or a `*_on_batch` method.
            arguments: Its arguments by name; may be changed in place.
        """
        ...

    def check_cross_replica_apply(self) -> None:
        """Raise if an optimizer cannot apply gradients in cross-replica context.

        Raises:
            RuntimeError: If it cannot.
        """
        ...

    def components(self, variable: Any) -> tuple[Any, ...]:
        """Return the component of `variable` on each local replica."""
        ...

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        """Return the bytes of `variable` on each local device."""
        ...

    def per_replica_value(self, variable: Any) -> DistributedValues:
        """Return the replicas' values of `variable`, in the form `reduce` takes."""
        ...

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        """Write one tensor to each local component of `variable`.

        Args:
            variable: A variable of this group.
            values: One tensor for each replica, of the variable's shape and dtype.
        """
        ...

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
            The outputs, with `Mirrored` in place of tensors; the plain output with
            one replica.
        """
        ...

    def mirror(self, value: Any) -> Mirrored:
        """Copy a tensor to each device."""
        ...

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
        ...

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        """Combine tensors over the replicas, and over `axis` unless it is None."""
        ...

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        """Concatenate tensors of different devices on the first device."""
        ...

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
        ...


class LogicalGroup(ReplicaGroup, Protocol):
    """Replica group whose replicas have several devices each."""

    def shard_tensor(self, tensor: Any, parts: Sequence[int]) -> Any:
        """Shard a replica's tensor over its devices, inside a compiled program.

        Args:
            tensor: The tensor.
            parts: The number of parts of each dimension.

        Raises:
            ValueError: If a dimension cannot be split into that many parts.
        """
        ...


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
        ...

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        """Reduce over the replicas; the gradient of a sum is the sum of the gradients.

        In a training step, where the replica has a row weight w, the gradient is
        (sum over s of w_s * g_s) / w_r, since the optimizer applies the weight again.
        """
        ...

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate in replica order."""
        ...

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        """Implement `ReplicaContext.merge_call`."""
        ...

    def once(self, fn: Callable[[], Any]) -> Any:
        """Call `fn`, which creates variables, once for all replicas.

        The first replica calls it; later ones get the same result.
        """
        ...

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        """Return the sum of weight * tensor over the replicas, without gradients.

        Args:
            tensors: Tensors of the same shapes on every replica.
            weight: This replica's row weight; None means 1. A weight of 0 adds zeros,
                so that a NaN of a replica without rows does not spread.
        """
        ...

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
        ...

    def write(self, variable: Any, value: Any) -> None:
        """Set only this replica's component of `variable`."""
        ...
