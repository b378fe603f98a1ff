"""`strategy.scope()`: what is entered, and left again."""

import contextlib
from typing import TYPE_CHECKING, Any

from keras_strategy.core import context
from keras_strategy.rules import first_values

if TYPE_CHECKING:
    from keras_strategy.strategies.base import Strategy


class StrategyScope(contextlib.AbstractContextManager):
    """`strategy.scope()`: may be entered several times, and inside itself."""

    def __init__(self, strategy: "Strategy"):
        self._strategy = strategy
        # What the adapter enters, innermost last.
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> "Strategy":
        context.require_cross_replica(self._strategy, "scope")
        context.enter_scope(self._strategy)
        try:
            engines = self._strategy.extended.group.scope()
            engines.__enter__()
        except BaseException:
            context.leave_scope()
            raise
        self._entered.append(engines)
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        if first_values.pending_values and context.scope_depth() == 1 and exception[0] is None:
            first_values.broadcast_pending_values()
        try:
            self._entered.pop().__exit__(*exception)
        finally:
            context.leave_scope()
