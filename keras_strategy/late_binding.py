"""Functions of higher layers for lower ones, set by the package's `__init__`."""

from collections.abc import Callable
from typing import Any

# Returns a new strategy of one replica, which applies outside every scope.
make_default_strategy: Callable[[], Any]
# Returns the adapter of the Keras backend in use.
get_engine: Callable[[], Any]
