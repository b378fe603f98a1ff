"""Checks that a program makes when it is executed, because a trace cannot."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategy.rules.step import LOCAL_BATCH_HINT

_MARKER = "keras_strategy refuses this, for reason number"
_messages: list[str] = []


def require(condition: Any, message: str) -> None:
    """Assert a scalar tensor, see `reraise_failed_checks`."""
    if message not in _messages:
        _messages.append(message)
    tf.debugging.Assert(condition, [f"{_MARKER} {_messages.index(message)}."])


@contextlib.contextmanager
def reraise_failed_checks() -> Iterator[None]:
    """Context manager that raises `ValueError` for a failed `require` in a program."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{_MARKER} (\d+)", str(error))
        if found is None:
            error.add_note(LOCAL_BATCH_HINT)
            raise
        refusal = ValueError(_messages[int(found[1])])
        refusal.add_note(
            "TensorFlow writes variables in place: what the step assigned before this "
            "error stays assigned."
        )
        raise refusal from None


class FirstStepCheck:
    """Checks that a program makes in its first execution only.

    Args:
        call_outside: See `GroupState.call_outside`.
    """

    def __init__(self, call_outside: Callable[..., Any]):
        self._call_outside = call_outside
        self._is_first: Any = None

    def warn_unless(self, holds: Callable[[], Any], warn: Callable[[], None]) -> None:
        """Call `warn` unless `holds()`, a boolean or a scalar tensor, is true."""

        def call_warn():
            tf.py_function(warn, [], [])
            return True

        def check():
            return tf.cond(tf.cast(holds(), "bool"), lambda: True, call_warn)

        if tf.executing_eagerly():
            check()
            return
        if self._is_first is None:
            self._is_first = self._call_outside(
                lambda: tf.Variable(tf.constant(True), trainable=False), in_scope=False
            )
        tf.cond(self._is_first.read_value(), check, lambda: True)

    def end(self) -> None:
        """End the first step."""
        if self._is_first is not None:
            self._is_first.assign(False)
