"""Optional client libraries, asked for only where they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str, who: str) -> Any:
    """Imports a module of an optional extra.

    Args:
        module: The dotted name of the module.
        extra: The extra of this package that brings it.
        who: What needs it, for the error.

    Returns:
        The module.

    Raises:
        ImportError: If it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs the package of `{module}`, which is not installed "
            f'({error}). Run: pip install "keras-strategy[{extra}]"'
        ) from error
