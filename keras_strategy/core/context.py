"""Per-thread context: the stack of strategy scopes, and the running replica.

Outside every scope the default strategy applies. Inside `strategy.scope()` a thread is
in *cross-replica context* and acts for all replicas at once. Inside a function that
`strategy.run` calls it is in *replica context* and acts for one replica.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy import late_binding
from keras_strategy.core.per_replica_attributes import discard_attribute_changes
from keras_strategy.core.registry import UnsupportedName, preserve_random_states
from keras_strategy.core.step_state import DryRun, override
from keras_strategy.options import check_communication_options
from keras_strategy.values import DistributedValues, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Replica, Strategy


class _ThreadState(threading.local):
    def __init__(self):
        self.scopes: list[Strategy | None] = []
        self.replica: ReplicaContext | None = None
        self.is_merging = False
        self.dry_run: DryRun | None = None
        # The strategy of a step that has all rows, as on one device.
        self.device_step: Strategy | None = None


# Public: hot patches read it without a function call.
thread_state = _ThreadState()
_global_scope: list[Any] = []  # at most one (strategy, entered scope)
_default: Any = None
# Returns True while this thread calls a Keras layer; the patches of layers set it.
is_in_layer: Callable[[], bool] = bool


# Without `functools.cache`, which torch.compile would trace through.
def default_strategy() -> "Strategy":
    """Return the single-replica strategy that applies outside every scope."""
    global _default
    if _default is None:
        _default = late_binding.make_default_strategy()
    return _default


def current_scope() -> "Strategy | None":
    """Return the strategy whose scope this thread is in, or None."""
    if thread_state.replica is not None:
        return thread_state.replica.strategy
    if thread_state.scopes:
        return thread_state.scopes[-1]
    return _global_scope[0][0] if _global_scope else None


def current_replica() -> "ReplicaContext | None":
    """Return the replica that this thread runs for `strategy.run`, or None."""
    return thread_state.replica


def distributed_replica() -> "Replica | None":
    """Return the running replica if its strategy has others, or None."""
    replica = thread_state.replica
    # Hot path, hundreds of calls a step: `_replicas` caches the property.
    if replica is None or (replica._replicas or replica._count_replicas()) == 1:
        return None
    return replica._replica


def replica_or_dry_run() -> "Replica | DryRun | None":
    """Return `distributed_replica()`, or the dry run this thread is in."""
    replica = thread_state.replica
    if replica is None:
        return thread_state.dry_run
    # Inlined from `distributed_replica`, for speed.
    if (replica._replicas or replica._count_replicas()) == 1:
        return None
    return replica._replica


@contextlib.contextmanager
def cross_replica_scope(strategy: "Strategy | None") -> Iterator[None]:
    """Enter the cross-replica context of `strategy`; None is no strategy."""
    replica, thread_state.replica = thread_state.replica, None
    thread_state.scopes.append(strategy)
    try:
        yield
    finally:
        thread_state.scopes.pop()
        thread_state.replica = replica


@contextlib.contextmanager
def with_all_rows(strategy: "Strategy") -> Iterator[None]:
    """Context manager in which a strategy has one replica, for code with all rows."""
    with override(thread_state, "device_step", strategy):
        yield


@contextlib.contextmanager
def device_step_scope(strategy: "Strategy") -> Iterator[None]:
    """Leave all strategies for a step on one device, which `get_strategy` hides."""
    with cross_replica_scope(None), with_all_rows(strategy):
        yield


@contextlib.contextmanager
def dry_run_scope() -> Iterator[DryRun]:
    """Leave all strategies for a dry run without effects, and yield its findings."""
    dry_run = DryRun()
    with (
        preserve_random_states(),
        cross_replica_scope(None),
        override(thread_state, "dry_run", dry_run),
        discard_attribute_changes(),
        keras.StatelessScope(),
    ):
        yield dry_run


# In them this thread runs the given replica's context; or acts for all replicas, which
# wait for it.
replica_scope = functools.partial(override, thread_state, "replica")
merge_call_scope = functools.partial(override, thread_state, "is_merging", True)


def get_strategy() -> "Strategy":
    """Return the current strategy: the innermost scope's, or the default one.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        assert ks.get_strategy() is strategy
    assert ks.get_strategy().num_replicas_in_sync == 1
    ```
    """
    return current_scope() or thread_state.device_step or default_strategy()


def has_strategy() -> bool:
    """Return True inside the scope of a strategy other than the default one.

    Example:

    ```python
    import keras_strategy as ks

    assert not ks.has_strategy()
    with ks.MirroredStrategy().scope():
        assert ks.has_strategy()
    ```
    """
    # As in tf.distribute, the default strategy's scope changes nothing.
    return get_strategy() is not default_strategy()


def get_replica_context() -> "ReplicaContext | None":
    """Return the context of the running replica; None in cross-replica context.

    Outside every scope, it is that of the default strategy's only replica. So it is in
    a layer that is called in cross-replica context, which gets the rows of all
    replicas: when a functional model is made, and in the steps of `fit` on JAX. A layer
    can call `all_gather` and `all_reduce` without knowing where it is.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.get_replica_context().num_replicas_in_sync == 1
    with ks.MirroredStrategy().scope():
        assert ks.get_replica_context() is None
    ```
    """
    if thread_state.replica is not None or thread_state.is_merging:
        return thread_state.replica
    if current_scope() in (None, _default) or is_in_layer():
        return default_strategy().extended.group.context
    return None


def in_cross_replica_context() -> bool:
    """Return True where code acts for all replicas of a strategy at once.

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
    is_in_scope = current_scope() not in (None, _default)
    return (is_in_scope or thread_state.is_merging) and thread_state.replica is None


def experimental_set_strategy(strategy: "Strategy | None") -> None:
    """Enter a strategy's scope without a `with` block, for notebooks.

    Args:
        strategy: The strategy, or None to return to the default one.

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
    if (
        len(thread_state.scopes) > len(_global_scope)
        or thread_state.replica is not None
    ):
        raise RuntimeError(
            "experimental_set_strategy was called inside a strategy's scope. "
            "Leave the scope first, or use `with strategy.scope():` alone."
        )
    if _global_scope:
        _, entered = _global_scope.pop()
        entered.close()
    if strategy is not None:
        entered = contextlib.ExitStack()
        entered.enter_context(strategy.scope())
        _global_scope.append((strategy, entered))


def require_cross_replica(strategy: "Strategy", method: str) -> None:
    """Raise unless this thread may act for all replicas of `strategy`."""
    if thread_state.replica is not None:
        methods = {"reduce": "all_reduce", "gather": "all_gather"}
        instead = f"get_replica_context().{methods.get(method, 'merge_call')}()"
        raise RuntimeError(
            f"`{method}` acts for all replicas and was called inside one. "
            f"Use {instead} there, or call `{method}` outside `strategy.run`."
        )
    if thread_state.is_merging and method == "run":
        raise RuntimeError(
            "`run` was called inside `merge_call`, while the replicas wait for it to "
            "end. Compute there only what needs no replica, return, and continue in "
            "the function that `run` called."
        )
    current = current_scope()
    if current is not None and current is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: `{method}` of {strategy!r} was called "
            f"inside the scope of {current!r}. Leave that scope first."
        )
    distribution = keras.distribution.distribution()
    is_foreign = not getattr(distribution, "of_strategy", distribution is None)
    if is_foreign and strategy is not _default:
        raise RuntimeError(
            "A model is distributed by a strategy or by keras.distribution, not by "
            f"both: `{method}` of {strategy!r} was called while the distribution "
            f"{type(distribution).__name__} is active. Leave its scope, or call "
            "`keras.distribution.set_distribution(None)`, before you use a strategy."
        )


def gather_rows(replica: "Replica", x: Any, axis: int) -> Any:
    """Gather a tensor's rows of all replicas along `axis`."""
    weight = replica.step.row_weight
    if weight is not None and not (isinstance(weight, float) and weight > 0.0):
        # A replica without rows computes on placeholder rows.
        shape = keras.ops.shape(x)
        axis %= len(shape)
        is_empty = isinstance(weight, float)
        count = 0 if is_empty else keras.ops.where(weight > 0, shape[axis], 0)
        x = x[(slice(None),) * axis + (slice(0, count),)]
    return replica.all_gather(x, axis)


class ReplicaContext:
    """Communication with the other replicas, for code that runs on one of them.

    Get it with `keras_strategy.get_replica_context()` inside a function that
    `strategy.run` calls, such as a layer, loss, metric or `train_step`.

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
        is_default = self._strategy is _default
        return (is_default and thread_state.device_step) or self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Index of this replica, from 0; a traced scalar on JAX."""
        return self._replica.id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers; 1 in a step that has all rows."""
        has_all_rows = thread_state.device_step is self._strategy
        return 1 if has_all_rows else self._count_replicas()

    def _count_replicas(self) -> int:
        if self._replicas is None:
            self._replicas = self._strategy.extended.topology.num_replicas
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
        if thread_state.device_step is self._strategy:
            return default_strategy().extended.group.context._all_reduce(op, value)
        all_reduce = self._replica.all_reduce
        custom = self._strategy.extended.custom_reducer
        if custom is not None:
            all_reduce = functools.partial(custom.all_reduce, self._replica)
        weight = self._replica.step.row_weight
        if weight is None or self._count_replicas() == 1:
            return all_reduce(op, value)
        # A replica without rows computes on a stand-in row, which must not count.
        value = keras.ops.convert_to_tensor(value)
        counts = keras.ops.convert_to_tensor(weight) > 0
        value = keras.ops.where(counts, value, keras.ops.zeros_like(value))
        total = all_reduce(ReduceOp.SUM, value)
        if op is ReduceOp.SUM:
            return total
        if "float" not in keras.backend.standardize_dtype(total.dtype):
            total = keras.ops.cast(total, keras.config.floatx())
        replicas = keras.ops.cast(counts, total.dtype)
        return total / self._replica.all_reduce(ReduceOp.SUM, replicas)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the replicas' values; every replica gets the result.

        Differentiable, as `all_reduce` is. In `fit`, `evaluate` and `predict` a replica
        without rows of the batch contributes none.

        Args:
            value: A structure of tensors of rank 1 or more. Sizes may differ between
                replicas along `axis`, except in a program that JAX compiled.
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
        if thread_state.device_step is self._strategy:
            return tree.map_structure(keras.ops.convert_to_tensor, value)
        return tree.map_structure(lambda x: gather_rows(self._replica, x, axis), value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Leave replica context for one call, made once for all replicas.

        Args:
            merge_fn: Called in cross-replica context as
                `merge_fn(strategy, *args, **kwargs)`, where each tensor argument is a
                `PerReplica` value of all replicas.
            args: Positional arguments, a tuple.
            kwargs: Keyword arguments.

        Returns:
            The output of `merge_fn`, with this replica's components.

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
            with merge_call_scope():
                return merge_fn(strategy, *args, **kwargs)

        return self._replica.merge_call(merge, tuple(args), dict(kwargs or {}))

    def _check(self, method: str, value: Any) -> None:
        """Raise outside this replica, and for distributed values."""
        if get_replica_context() is not self:
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
