"""The scope that fit and its like enter by themselves, and leave for other models.

A callback may well use another model: a teacher that predicts, a plain model that is
fitted beside. On one device nothing stands in its way, so the scope that nobody but
`fit` entered must not either. A scope that the user entered is not left for anybody.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from keras_strategy.core import context


class _Entered(threading.local):
    """The scopes that this thread's entry points are in, with their depths."""

    def __init__(self):
        self.scopes: list[tuple[Any, Any, int]] = []


_entered = _Entered()


@contextlib.contextmanager
def entered(strategy: Any) -> Iterator[None]:
    """Enters the scope of a model's strategy, for `fit` or its like.

    Args:
        strategy: The strategy.
    """
    scope = strategy.scope()
    with scope:
        _entered.scopes.append((strategy, scope, context.depth()))
        try:
            yield
        finally:
            _entered.scopes.pop()


@contextlib.contextmanager
def left_for(strategy: Any) -> Iterator[None]:
    """Leaves the scope that the `fit` of another strategy's model entered, if any.

    Args:
        strategy: The strategy of the model that is to be worked with, or None.
    """
    if not _entered.scopes:
        yield
        return
    current, scope, depth = _entered.scopes[-1]
    innermost = depth == context.depth() and context.current_replica() is None
    if current is strategy or not innermost:
        yield
        return
    _entered.scopes.pop()
    scope.__exit__(None, None, None)
    try:
        # The fit around that one may be of another strategy as well.
        with left_for(strategy):
            yield
    finally:
        scope.__enter__()
        _entered.scopes.append((current, scope, depth))
