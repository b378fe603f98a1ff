"""What a program refuses when it is executed, and cannot raise in Python."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

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


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Surrounds what executes programs, and raises what was required in them."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{_MARK} (\d+)", str(error))
        if found is None:
            raise
        refusal = ValueError(_reasons[int(found[1])])
        refusal.add_note(
            "TensorFlow writes variables in place: what the step had assigned before "
            "this error stays assigned."
        )
        raise refusal from None
