"""Optional client libraries, imported only where they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str, user: str) -> Any:
    """Import a module of an optional extra.

    Args:
        module: The dotted name of the module.
        extra: The extra of this package that installs it.
        user: What needs it, for the error.

    Raises:
        ImportError: If it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} needs the package of `{module}`, which is not installed "
            f'({error}). Run: pip install "keras-strategy[{extra}]"'
        ) from error
