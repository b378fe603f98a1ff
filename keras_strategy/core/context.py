"""Who is in charge here: the stack of scopes, and the replica that is running.

A thread is in one of three places. Outside every scope the default strategy is in
charge. Inside `strategy.scope()` it is in *cross-replica context*: it acts for all
replicas at once. Inside a function that `strategy.run` calls it is in *replica
context*: it acts for one replica.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategy.core.protocol import Replica
    from keras_strategy.core.replica_context import ReplicaContext
    from keras_strategy.core.strategy import Strategy


@dataclass
class Trial:
    """What became known of a function that was called as on one device.

    Attributes:
        knows: Whether it, or a rule of ours that has no part in the trial, knows of the
            other replicas.
        drew: Whether it drew random numbers.
        share: Which part of all rows it is called with.
        draws: What it drew, in a rehearsal of a step; see `rules.draws`.
        gradients: What it has given to optimizers, which apply none of it; None where
            it ends at the first of them.
        drawing: Whether it is drawing now.
        of_rows: Whether it is tried if what it makes of a row depends on others. What
            is known of Keras's own layers is no part of that.
        step: Stands for a replica's `StepState`, where it draws what one device draws
            for its rows.
    """

    knows: bool = False
    drew: bool = False
    share: float = 1.0
    draws: list[Any] | None = None
    gradients: list[Any] | None = None
    drawing: bool = False
    of_rows: bool = False
    step: Any = None

    def draw_once(self, what: Any, draw: Callable[[], Any], skip: Any) -> Any:
        """See `core.protocol.Replica.draw_once`."""
        return draw()


class _Place(threading.local):
    """Where this thread is."""

    def __init__(self):
        self.scopes: list[Strategy | None] = []
        self.replica: ReplicaContext | None = None
        self.replicas_wait = False
        self.trial: Trial | None = None


_place = _Place()
# For a hook that is asked more often than any other: a look at it, and no call.
place = _place
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


def current_replica() -> "ReplicaContext | None":
    """The replica that this thread runs for `strategy.run`, or None."""
    return _place.replica


def distributed_replica() -> "Replica | None":
    """The replica that is running, if there are others beside it."""
    replica = _place.replica
    # Hooks ask hundreds of times in a step: the property is called for the first alone.
    if replica is None or (replica._replicas or replica.num_replicas_in_sync) == 1:
        return None
    return replica._replica  # the rules work with what the adapter made


def replica_or_trial() -> "Replica | Trial | None":
    """As `distributed_replica`; where a function is tried, the trial."""
    replica = _place.replica
    if replica is None:
        return _place.trial
    # As there, and not by a call of it, for the same reason.
    if (replica._replicas or replica.num_replicas_in_sync) == 1:
        return None
    return replica._replica


@contextlib.contextmanager
def strategy_in_charge(strategy: "Strategy | None") -> Iterator[None]:
    """Puts this thread into the cross-replica context of `strategy`.

    Args:
        strategy: The strategy; None for what belongs to no strategy.
    """
    replica, _place.replica = _place.replica, None
    enter_scope(strategy)
    try:
        yield
    finally:
        leave_scope()
        _place.replica = replica


def enter_scope(strategy: "Strategy | None") -> None:
    """Puts this thread, which runs no replica, into a scope until `leave_scope`."""
    _place.scopes.append(strategy)


def leave_scope() -> None:
    """Leaves the scope that was entered last."""
    _place.scopes.pop()


@contextlib.contextmanager
def as_on_one_device() -> Iterator[Trial]:
    """Puts this thread, which runs a replica, where no strategy is.

    Yields:
        What becomes known there.
    """
    trial = Trial()
    with strategy_in_charge(None):
        before, _place.trial = _place.trial, trial
        try:
            yield trial
        finally:
            _place.trial = before


@contextlib.contextmanager
def replica_in_charge(context: "ReplicaContext") -> Iterator[None]:
    """Puts this thread into the replica context `context`."""
    previous, _place.replica = _place.replica, context
    try:
        yield
    finally:
        _place.replica = previous


@contextlib.contextmanager
def replicas_waiting() -> Iterator[None]:
    """Surrounds what one thread does for all replicas while they wait for it."""
    before, _place.replicas_wait = _place.replicas_wait, True
    try:
        yield
    finally:
        _place.replicas_wait = before


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


def get_replica_context() -> "ReplicaContext | None":
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
    if _place.trial is not None:
        _place.trial.knows = True
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
        RuntimeError: Inside a replica, inside another strategy's scope, or, for `run`,
            inside `merge_call`.
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
    if _place.replicas_wait and method == "run":
        raise RuntimeError(
            "`run` was called inside `merge_call`, while the replicas wait for it to "
            "end. Compute there what needs no replica, return to the replicas, and go "
            "on in the function that `run` called."
        )
    current = current_scope()
    if current is not None and current is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: `{method}` of {strategy!r} was called "
            f"inside the scope of {current!r}. Leave that scope first."
        )
