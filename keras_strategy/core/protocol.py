"""All that an adapter must do for replicas, and nothing that the core can do for it.

`ReplicaGroup` is the set of devices of one strategy. `Replica` is one of them while a
function runs on it. Their engine is in `core/engine.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategy.values.distributed import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.replica_context import ReplicaContext
    from keras_strategy.core.step_state import StepState
    from keras_strategy.core.workers import Workers
    from keras_strategy.options.run import RunOptions


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
