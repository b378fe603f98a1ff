"""Communication between replicas, from a function that runs on one of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.refused import UnsupportedName
from keras_strategy.options.communication import check_communication_options
from keras_strategy.values.distributed import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.protocol import Replica
    from keras_strategy.core.strategy import Strategy


class ReplicaContext:
    """Communication with the other replicas, for code that runs on one of them.

    Get it with `keras_strategy.get_replica_context()` inside a function that
    `strategy.run` calls, or inside a layer, loss, metric or `train_step` that
    such a function calls.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()

    def count():
        context = ks.get_replica_context()
        return context.all_reduce("SUM", keras.ops.ones(()))

    total = strategy.experimental_local_results(strategy.run(count))[0]
    assert int(total) == strategy.num_replicas_in_sync
    ```
    """

    __enter__ = UnsupportedName("`strategy.run` calls its function inside the replica.")

    def __init__(self, strategy: "Strategy", replica: "Replica"):
        self._strategy = strategy
        self._replica = replica
        self._replicas: int | None = None  # cached: read very often

    @property
    def strategy(self) -> "Strategy":
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Index of this replica, from 0; a traced scalar on JAX."""
        return self._replica.id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers."""
        if self._replicas is None:
            self._replicas = self._strategy.num_replicas_in_sync
        return self._replicas

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica."""
        return self._replica.devices

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: Any = None
    ) -> Any:
        """Reduce a value over the replicas; every replica gets the result.

        Differentiable: the gradient of a sum is the sum of the gradients. In `fit`,
        `evaluate` and `predict` a replica without rows of the batch does not count.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value: A structure of tensors or numbers, with equal shapes on all replicas.
            options: A `CommunicationOptions`, or None.

        Returns:
            The structure, reduced.

        Raises:
            ValueError: If `reduce_op` is invalid, the shapes differ, or the value is a
                distributed value.
            RuntimeError: Outside this replica.
        """
        op = ReduceOp.parse(reduce_op)
        check_communication_options(options)
        self._check("all_reduce", value)
        return tree.map_structure(lambda x: self._all_reduce(op, x), value)

    def _all_reduce(self, op: ReduceOp, value: Any) -> Any:
        weight = self._replica.step.row_weight
        if weight is None or self.num_replicas_in_sync == 1:
            return self._reduce(op, value)
        # A replica without rows computes on a stand-in row, which must not count.
        value = keras.ops.convert_to_tensor(value)
        counts = keras.ops.convert_to_tensor(weight) > 0
        value = keras.ops.where(counts, value, keras.ops.zeros_like(value))
        total = self._reduce(ReduceOp.SUM, value)
        if op is ReduceOp.SUM:
            return total
        if "float" not in keras.backend.standardize_dtype(total.dtype):
            total = keras.ops.cast(total, keras.config.floatx())
        replicas = keras.ops.cast(counts, total.dtype)
        return total / self._replica.all_reduce(ReduceOp.SUM, replicas)

    def _reduce(self, op: ReduceOp, value: Any) -> Any:
        custom = self._strategy.extended.custom_reducer
        if custom is None:
            return self._replica.all_reduce(op, value)
        return custom.all_reduce(self._replica, op, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values; every replica gets the result.

        Args:
            value: A structure of tensors of rank 1 or more. Sizes along `axis` may
                differ between replicas (not inside a program that JAX compiled); all
                other sizes must be equal.
            axis: The dimension along which the values are joined, in replica order.
            options: A `CommunicationOptions`, or None.

        Returns:
            The structure, gathered.

        Raises:
            ValueError: If a value has no such dimension, other sizes differ, or it is a
                distributed value.
            RuntimeError: Outside this replica.
        """
        check_communication_options(options)
        self._check("all_gather", value)
        for leaf in tree.flatten(value):
            shape = tuple(keras.ops.shape(leaf))
            if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
                raise ValueError(
                    "`all_gather` joins values of rank 1 or more along one of their "
                    f"dimensions. Received: axis={axis!r} and a value of shape {shape}"
                )
        return tree.map_structure(lambda x: self._replica.all_gather(x, axis), value)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        """Leave replica context for one call, made once for all replicas.

        Args:
            merge_fn: Called in cross-replica context as
                `merge_fn(strategy, *args, **kwargs)`, where each tensor argument is a
                `PerReplica` value of all replicas.
            args: Positional arguments, a tuple.
            kwargs: Keyword arguments.

        Returns:
            The output of `merge_fn`, with this replica's component in place of every
            distributed value.

        Raises:
            TypeError: If `merge_fn` is not callable.
            RuntimeError: Outside this replica, or if `merge_fn` calls `strategy.run`.
        """
        if not callable(merge_fn):
            raise TypeError(
                "Argument `merge_fn` must be a function. "
                f"Received: merge_fn={merge_fn!r} of type {type(merge_fn).__name__}"
            )
        self._check("merge_call", None)

        def merge(strategy, *args, **kwargs):
            with context.merge_call_scope():
                return merge_fn(strategy, *args, **kwargs)

        return self._replica.merge_call(merge, tuple(args), dict(kwargs or {}))

    def _check(self, method: str, value: Any) -> None:
        """Raise outside this replica, and for distributed values."""
        if context.get_replica_context() is not self:
            raise RuntimeError(
                f"`{method}` was called outside its replica. Call it in the "
                "function that `strategy.run` calls, on the result of "
                "`keras_strategy.get_replica_context()` there. In cross-replica "
                "context, such as in `merge_call`, use `strategy.reduce` or "
                "`strategy.gather`."
            )
        if any(isinstance(leaf, DistributedValues) for leaf in tree.flatten(value)):
            raise ValueError(
                f"`{method}` takes this replica's value, not a distributed one. Pass "
                "distributed values to `strategy.run` as arguments. Received: "
                f"value={value!r}"
            )

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )
