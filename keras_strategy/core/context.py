"""Per-thread context: the stack of strategy scopes, and the running replica.

Outside every scope the default strategy applies. Inside `strategy.scope()` a thread is
in *cross-replica context* and acts for all replicas at once. Inside a function that
`strategy.run` calls it is in *replica context* and acts for one replica.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_strategy.core.step_state import DryRun

if TYPE_CHECKING:
    from keras_strategy.core.protocol import Replica
    from keras_strategy.core.replica_context import ReplicaContext
    from keras_strategy.core.strategy import Strategy


class _Place(threading.local):
    """Where this thread is."""

    def __init__(self):
        self.scopes: list[Strategy | None] = []
        self.replica: ReplicaContext | None = None
        self.replicas_wait = False
        self.dry_run: DryRun | None = None


_place = _Place()
# Public to hot hooks, which read it without a function call.
thread_state = _place
_process_wide: list[Any] = []  # at most one (strategy, entered scope)
_default: "Strategy | None" = None
_make_default: "Callable[[], Strategy] | None" = None


def default_strategy() -> "Strategy":
    """Return the single-replica strategy that applies outside every scope."""
    global _default
    if _default is None:
        assert _make_default is not None, "`strategies` registers it on import"
        _default = _make_default()
    return _default


def register_default_strategy(make: Callable[[], "Strategy"]) -> None:
    """Register what creates the default strategy on first use."""
    global _make_default
    _make_default = make


def current_scope() -> "Strategy | None":
    """Return the strategy whose scope this thread is in, or None."""
    if _place.replica is not None:
        return _place.replica.strategy
    if _place.scopes:
        return _place.scopes[-1]
    return _process_wide[0][0] if _process_wide else None


def scope_depth() -> int:
    """Return the number of nested scopes of this thread."""
    return len(_place.scopes)


def current_replica() -> "ReplicaContext | None":
    """Return the replica that this thread runs for `strategy.run`, or None."""
    return _place.replica


def distributed_replica() -> "Replica | None":
    """Return the running replica if its strategy has others, or None."""
    replica = _place.replica
    # Hot path, hundreds of calls a step: `_replicas` caches the property.
    if replica is None or (replica._replicas or replica.num_replicas_in_sync) == 1:
        return None
    return replica._replica


def replica_or_dry_run() -> "Replica | DryRun | None":
    """Return `distributed_replica()`, or the dry run this thread is in."""
    replica = _place.replica
    if replica is None:
        return _place.dry_run
    # Inlined from `distributed_replica`, for speed.
    if (replica._replicas or replica.num_replicas_in_sync) == 1:
        return None
    return replica._replica


@contextlib.contextmanager
def cross_replica_scope(strategy: "Strategy | None") -> Iterator[None]:
    """Enter the cross-replica context of `strategy`; None is no strategy."""
    replica, _place.replica = _place.replica, None
    enter_scope(strategy)
    try:
        yield
    finally:
        leave_scope()
        _place.replica = replica


def enter_scope(strategy: "Strategy | None") -> None:
    """Enter a scope until `leave_scope`; for threads that run no replica."""
    _place.scopes.append(strategy)


def leave_scope() -> None:
    """Leave the innermost scope."""
    _place.scopes.pop()


@contextlib.contextmanager
def dry_run_scope() -> Iterator[DryRun]:
    """Leave all strategies for a dry run, and yield its findings."""
    trial = DryRun()
    with cross_replica_scope(None):
        before, _place.dry_run = _place.dry_run, trial
        try:
            yield trial
        finally:
            _place.dry_run = before


@contextlib.contextmanager
def replica_scope(context: "ReplicaContext") -> Iterator[None]:
    """Enter the replica context `context`."""
    previous, _place.replica = _place.replica, context
    try:
        yield
    finally:
        _place.replica = previous


@contextlib.contextmanager
def merge_call_scope() -> Iterator[None]:
    """Mark that this thread acts for all replicas while they wait for it."""
    before, _place.replicas_wait = _place.replicas_wait, True
    try:
        yield
    finally:
        _place.replicas_wait = before


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
    return current_scope() or default_strategy()


def has_strategy() -> bool:
    """Return True inside the scope of a strategy.

    Example:

    ```python
    import keras_strategy as ks

    assert not ks.has_strategy()
    with ks.MirroredStrategy().scope():
        assert ks.has_strategy()
    ```
    """
    return current_scope() is not None


def get_replica_context() -> "ReplicaContext | None":
    """Return the context of the running replica.

    Returns:
        The `ReplicaContext`; None in cross-replica context; outside every scope the
        context of the default strategy's only replica.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.get_replica_context().num_replicas_in_sync == 1
    with ks.MirroredStrategy().scope():
        assert ks.get_replica_context() is None
    ```
    """
    if _place.dry_run is not None:
        _place.dry_run.depends_on_replicas = True
    if current_scope() is None:
        return default_strategy().extended.group.context
    return _place.replica


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
    return current_scope() is not None and _place.replica is None


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
    """Raise unless this thread may act for all replicas of `strategy`.

    Args:
        strategy: The strategy whose method was called.
        method: The method's name.

    Raises:
        RuntimeError: In a replica, in another strategy's scope, or, for `run`, in
            `merge_call`.
    """
    instead = {
        "reduce": "get_replica_context().all_reduce()",
        "gather": "get_replica_context().all_gather()",
    }.get(method, "get_replica_context().merge_call()")
    if _place.replica is not None:
        raise RuntimeError(
            f"`{method}` acts for all replicas and was called inside one. "
            f"Use {instead} there, or call `{method}` outside `strategy.run`."
        )
    if _place.replicas_wait and method == "run":
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
