"""What a program refuses or warns of when it is executed, and Python cannot know."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategy.rules.step import A_PART

_MARK = "keras_strategy refuses this, for reason number"
_reasons: list[str] = []


def require(condition: Any, message: str) -> None:
    """Raises `ValueError` unless a condition holds; see `explained`.

    Args:
        condition: A scalar tensor.
        message: The error's message.
    """
    if message not in _reasons:
        _reasons.append(message)
    tf.debugging.Assert(condition, [f"{_MARK} {_reasons.index(message)}."])


class FirstStep:
    """What a program does when it is executed for the first time.

    Args:
        eagerly: See `Peers.beside_them`.
    """

    def __init__(self, eagerly: Callable[..., Any]):
        self._eagerly = eagerly
        self._to_come: Any = None

    def warn_unless(self, holds: Callable[[], Any], warn: Callable[[], None]) -> None:
        """Warns unless something holds.

        Args:
            holds: Gives whether it holds, a boolean or a scalar tensor.
            warn: Warns.
        """

        def warned():
            tf.py_function(warn, [], [])
            return True

        def look():
            return tf.cond(tf.cast(holds(), "bool"), lambda: True, warned)

        if tf.executing_eagerly():
            look()
            return
        if self._to_come is None:
            self._to_come = self._eagerly(
                lambda: tf.Variable(tf.constant(True), trainable=False), in_scope=False
            )
        tf.cond(self._to_come.read_value(), look, lambda: True)

    def end(self) -> None:
        """Ends the step."""
        if self._to_come is not None:
            self._to_come.assign(False)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Surrounds what executes programs, and raises what was required in them."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{_MARK} (\d+)", str(error))
        if found is None:
            error.add_note(A_PART)
            raise
        refusal = ValueError(_reasons[int(found[1])])
        refusal.add_note(
            "TensorFlow writes variables in place: what the step had assigned before "
            "this error stays assigned."
        )
        raise refusal from None
