"""Who is in charge here: the stack of scopes, and the replica that is running.

A thread is in one of three places. Outside every scope the default strategy is in
charge. Inside `strategy.scope()` it is in *cross-replica context*: it acts for all
replicas at once. Inside a function that `strategy.run` calls it is in *replica
context*: it acts for one replica.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.options.communication import check_communication_options
from keras_strategy.values.distributed import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.protocol import Replica, Strategy


class ReplicaContext:
    """What a function that runs on one replica can ask of the others.

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

    def __init__(self, strategy: "Strategy", replica: "Replica"):
        self._strategy = strategy
        self._replica = replica
        self._replicas: int | None = None  # asked for very often
        # The rest is the state of a training step, see rules/row_weights.py.
        self._row_weight: Any = None
        self._applying = False
        # Of the loss that is computed now.
        self._loss_is_scalar = False
        self._has_all_rows = False
        self._written: dict[int, Any] = {}

    @property
    def strategy(self) -> "Strategy":
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0; a traced scalar on JAX."""
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
        """Combines a value over the replicas; every replica gets the result.

        Differentiable: the gradient of a sum is the sum of the gradients. In `fit`,
        `evaluate` and `predict` a replica that got no rows of a batch counts nothing.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value: A structure of tensors or numbers, of the same shapes on
                every replica.
            options: A `CommunicationOptions`, or None.

        Returns:
            The structure, reduced.

        Raises:
            ValueError: If `reduce_op` is not one, the shapes differ, or the value is
                a distributed value.
            RuntimeError: Outside of this replica.
        """
        op = ReduceOp.parse(reduce_op)
        check_communication_options(options)
        self._check("all_reduce", value)
        return tree.map_structure(lambda x: self._all_reduce(op, x), value)

    def _all_reduce(self, op: ReduceOp, value: Any) -> Any:
        if self._row_weight is None or self.num_replicas_in_sync == 1:
            return self._replica.all_reduce(op, value)
        # A replica without rows works on a stand-in, which nobody may notice.
        value = keras.ops.convert_to_tensor(value)
        counts = keras.ops.convert_to_tensor(self._row_weight) > 0
        value = keras.ops.where(counts, value, keras.ops.zeros_like(value))
        total = self._replica.all_reduce(ReduceOp.SUM, value)
        if op is ReduceOp.SUM:
            return total
        if "float" not in keras.backend.standardize_dtype(total.dtype):
            total = keras.ops.cast(total, keras.config.floatx())
        replicas = keras.ops.cast(counts, total.dtype)
        return total / self._replica.all_reduce(ReduceOp.SUM, replicas)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates the replicas' values; every replica gets the result.

        Args:
            value: A structure of tensors of rank 1 or more. Sizes along `axis`
                may differ between replicas (not inside a program that JAX
                compiled), the others must agree.
            axis: The dimension along which the values are joined, in the order
                of the replicas.
            options: A `CommunicationOptions`, or None.

        Returns:
            The structure, gathered.

        Raises:
            ValueError: If a value has no such dimension, the others differ, or it is
                a distributed value.
            RuntimeError: Outside of this replica.
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
        """Leaves replica context for one call, made once for all replicas.

        Args:
            merge_fn: Called in cross-replica context as
                `merge_fn(strategy, *args, **kwargs)`, where each tensor of the
                arguments has become a `PerReplica` value of all replicas.
            args: Positional arguments, a tuple.
            kwargs: Keyword arguments.

        Returns:
            What `merge_fn` returned, with the component of this replica in the
            place of every distributed value.

        Raises:
            TypeError: If `merge_fn` cannot be called.
            RuntimeError: Outside of this replica.
        """
        if not callable(merge_fn):
            raise TypeError(
                "Argument `merge_fn` must be a function. "
                f"Received: merge_fn={merge_fn!r} of type {type(merge_fn).__name__}"
            )
        self._check("merge_call", None)
        return self._replica.merge_call(merge_fn, tuple(args), dict(kwargs or {}))

    def _check(self, method: str, value: Any) -> None:
        """Raises unless this thread is in this replica, with a value of its own."""
        if get_replica_context() is not self:
            raise RuntimeError(
                f"`{method}` was called outside of its replica. Call it in the "
                "function that `strategy.run` calls, on what "
                "`keras_strategy.get_replica_context()` gives there; in "
                "cross-replica context, which `merge_call` leads to, use "
                "`strategy.reduce` or `strategy.gather`."
            )
        if any(isinstance(leaf, DistributedValues) for leaf in tree.flatten(value)):
            raise ValueError(
                f"`{method}` takes this replica's value, not a distributed one. Give "
                "distributed values to `strategy.run` as arguments. Received: "
                f"value={value!r}"
            )

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


class _Place(threading.local):
    """Where this thread is."""

    def __init__(self):
        self.scopes: list[Strategy | None] = []
        self.replica: ReplicaContext | None = None


_place = _Place()
_process_wide: list[Any] = []  # at most one (strategy, entered scope)
_default: "Strategy | None" = None
_make_default: "Callable[[], Strategy] | None" = None


def default_strategy() -> "Strategy":
    """The strategy of one replica that is in charge outside every scope."""
    global _default
    if _default is None:
        assert _make_default is not None, "the strategies register it on import"
        _default = _make_default()
    return _default


def make_default_with(make: Callable[[], "Strategy"]) -> None:
    """Sets what makes the default strategy, when it is first needed."""
    global _make_default
    _make_default = make


def current_scope() -> "Strategy | None":
    """The strategy whose scope this thread is in, None outside every scope."""
    if _place.replica is not None:
        return _place.replica.strategy
    if _place.scopes:
        return _place.scopes[-1]
    return _process_wide[0][0] if _process_wide else None


def depth() -> int:
    """How many scopes this thread is in, one inside the other."""
    return len(_place.scopes)


def current_replica() -> ReplicaContext | None:
    """The replica that this thread runs for `strategy.run`, or None."""
    return _place.replica


@contextlib.contextmanager
def strategy_in_charge(strategy: "Strategy | None") -> Iterator[None]:
    """Puts this thread into the cross-replica context of `strategy`.

    Args:
        strategy: The strategy; None for what belongs to no strategy.
    """
    _place.scopes.append(strategy)
    replica, _place.replica = _place.replica, None
    try:
        yield
    finally:
        _place.replica = replica
        _place.scopes.pop()


@contextlib.contextmanager
def replica_in_charge(context: ReplicaContext) -> Iterator[None]:
    """Puts this thread into the replica context `context`."""
    previous, _place.replica = _place.replica, context
    try:
        yield
    finally:
        _place.replica = previous


def get_strategy() -> "Strategy":
    """Returns the strategy in charge: the innermost scope's, or the default one.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        assert ks.get_strategy() is strategy
    assert ks.get_strategy().num_replicas_in_sync == 1
    ```
    """
    return current_scope() or default_strategy()


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is in charge.

    Example:

    ```python
    import keras_strategy as ks

    assert not ks.has_strategy()
    with ks.MirroredStrategy().scope():
        assert ks.has_strategy()
    ```
    """
    return current_scope() is not None


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is running.

    Returns:
        The `ReplicaContext`; None in cross-replica context; outside every scope
        the context of the default strategy's only replica.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.get_replica_context().num_replicas_in_sync == 1
    with ks.MirroredStrategy().scope():
        assert ks.get_replica_context() is None
    ```
    """
    if current_scope() is None:
        return default_strategy().extended.group.context
    return _place.replica


def in_cross_replica_context() -> bool:
    """Returns whether this code acts for all replicas of a strategy at once.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    assert not ks.in_cross_replica_context()
    with strategy.scope():
        assert ks.in_cross_replica_context()
    assert strategy.run(ks.in_cross_replica_context) is False
    ```
    """
    return current_scope() is not None and _place.replica is None


def experimental_set_strategy(strategy: "Strategy | None") -> None:
    """Puts a strategy in charge without a `with` block, for notebooks.

    Args:
        strategy: The strategy, or None to go back to the default one.

    Raises:
        RuntimeError: Inside a scope that was entered with `with`.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    ks.experimental_set_strategy(strategy)
    assert ks.get_strategy() is strategy
    ks.experimental_set_strategy(None)
    assert not ks.has_strategy()
    ```
    """
    if len(_place.scopes) > len(_process_wide) or _place.replica is not None:
        raise RuntimeError(
            "experimental_set_strategy was called inside a strategy's scope. "
            "Leave the scope first, or use `with strategy.scope():` alone."
        )
    if _process_wide:
        _, entered = _process_wide.pop()
        entered.close()
    if strategy is not None:
        entered = contextlib.ExitStack()
        entered.enter_context(strategy.scope())
        _process_wide.append((strategy, entered))


def require_cross_replica(strategy: "Strategy", method: str) -> None:
    """Raises unless this thread may act for all replicas of `strategy`.

    Args:
        strategy: The strategy whose method was called.
        method: The method's name.

    Raises:
        RuntimeError: Inside a replica, or inside another strategy's scope.
    """
    instead = {
        "reduce": "get_replica_context().all_reduce()",
        "gather": "get_replica_context().all_gather()",
    }.get(method, "get_replica_context().merge_call()")
    if _place.replica is not None:
        raise RuntimeError(
            f"`{method}` acts for all replicas and was called inside one of them. "
            f"Use {instead} there, or call `{method}` outside `strategy.run`."
        )
    current = current_scope()
    if current is not None and current is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: `{method}` of {strategy!r} was called "
            f"inside the scope of {current!r}. Leave that scope first."
        )
