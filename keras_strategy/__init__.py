"""Distributed training for Keras 3, with tf.distribute's API, on any backend.

Names are imported on first use, and Keras and its backend with them, so that processes
that only start or watch others need neither.
"""

import ast
import functools
import importlib
import os
import pkgutil
from typing import Any

from keras_strategy import late_binding

__version__ = "0.1.0"

# The stub, which type checkers read, also lists the home module of each name here.
_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_HOME_OF = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module != "typing"
    for alias in node.names
}
_HOME_OF |= dict.fromkeys(
    ("ParameterServerStrategy", "Server"), "keras_strategy.core.registry"
)

__all__ = sorted([*_HOME_OF, "__version__"])  # pyright: ignore


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _call_lazily(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)()


_mirrored = "strategies.mirrored", "DefaultStrategy"
late_binding.make_default_strategy = functools.partial(_call_lazily, *_mirrored)
_registry = "core.registry", "get_engine"
late_binding.get_engine = functools.partial(_call_lazily, *_registry)


# The CPU must be split before first use, and a program may use it through Keras alone
# before it uses a name of this package.
if os.environ.get("KERAS_STRATEGY_LOGICAL_CPUS"):
    importlib.import_module("keras_strategy.config").apply_environment()
