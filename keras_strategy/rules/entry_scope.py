"""The implicit scope of `fit` and similar methods.

A callback may use another model: predict with a teacher, fit a plain model. On one
device that works, so the scope that `fit` entered implicitly must not prevent it. A
scope that the user entered is never suspended.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from keras_strategy.core import context


class _Entered(threading.local):
    """Scopes, with their depths, that `fit` entered implicitly in this thread."""

    def __init__(self):
        self.scopes: list[tuple[Any, Any, int]] = []


_entered = _Entered()


@contextlib.contextmanager
def enter_implicit_scope(strategy: Any) -> Iterator[None]:
    """Enter the scope of a model's strategy implicitly."""
    scope = strategy.scope()
    with scope:
        _entered.scopes.append((strategy, scope, context.scope_depth()))
        try:
            yield
        finally:
            _entered.scopes.pop()


@contextlib.contextmanager
def suspend_implicit_scope(strategy: Any) -> Iterator[None]:
    """Suspend an implicit scope of another strategy, if one is innermost."""
    if not _entered.scopes:
        yield
        return
    current, scope, depth = _entered.scopes[-1]
    innermost = depth == context.scope_depth() and context.current_replica() is None
    if current is strategy or not innermost:
        yield
        return
    _entered.scopes.pop()
    scope.__exit__(None, None, None)
    try:
        # The fit around that one may be of another strategy as well.
        with suspend_implicit_scope(strategy):
            yield
    finally:
        scope.__enter__()
        _entered.scopes.append((current, scope, depth))
