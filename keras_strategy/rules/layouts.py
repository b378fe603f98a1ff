"""VariableLayouts of weights on a replica's logical devices, from `layout_map`."""

import difflib
import logging
import re
from collections.abc import Mapping
from typing import Any

import keras

from keras_strategy.values.logical_devices import partition_axes

logger = logging.getLogger("keras_strategy")


class VariableLayouts:
    """VariableLayouts of a strategy's variables.

    Attributes:
        given: The strategy's argument: a dict from regular expressions for variable
            paths to parts per dimension, or a `keras.distribution.LayoutMap`.
        parts: The number of parts per dimension, for each entry.
    """

    def __init__(self, layout_map: Any, logical: int):
        self.layout_map, self.logical = layout_map, logical
        of_keras = isinstance(layout_map, keras.distribution.LayoutMap)
        if not of_keras and not isinstance(layout_map, Mapping):
            raise TypeError(
                "Argument `layout_map` must be a dict such as {'dense.*kernel': (1, "
                f"{logical})}}, or a keras.distribution.LayoutMap. Received: "
                f"layout_map={layout_map!r} of type {type(layout_map).__name__}"
            )
        # Keras looks up a path by its own rules.
        self._keys = layout_map if of_keras else None
        self.parts = {
            key: self._checked(key, _sizes(layout_map, key) if of_keras else value)
            for key, value in dict(layout_map.items()).items()
        }
        self._unused = dict.fromkeys(self.parts)
        self._trained: dict[str, None] = {}  # paths, in order

    def _checked(self, key: Any, parts: Any) -> tuple[int, ...]:
        received = f"Received: layout_map[{key!r}]={parts!r}"
        try:
            re.compile(key)
        except (TypeError, re.error) as error:
            raise ValueError(
                "A key of `layout_map` must be a regular expression, which is looked "
                f"for in the paths of variables. {received}"
            ) from error
        if not isinstance(parts, tuple | list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in parts
        ):
            raise ValueError(
                "A layout says into how many parts each dimension of a variable is "
                f"split, such as (1, {self.logical}). {received}"
            )
        if partition_axes(parts, self.logical) is None:
            raise ValueError(
                "The product of a layout's parts must divide the number of logical "
                f"devices of each replica, which is {self.logical}. {received}"
            )
        return tuple(parts)

    def partitions_of(self, variable: Any) -> tuple[int, ...] | None:
        """Return the number of parts per dimension, or None if not split.

        A non-trainable variable that does not fit is not split. For a trainable one
        that, and several matching layouts, raise `ValueError`.
        """
        keys = self._keys_of(variable.path)
        for key in keys:
            self._unused.pop(key, None)
        if variable.trainable:
            self._trained[variable.path] = None
        if not keys:
            return None
        parts, shape = self.parts[keys[0]], tuple(variable.shape)
        fits = len(parts) == len(shape) and not any(
            size % n for size, n in zip(shape, parts, strict=True)
        )
        if fits and len(keys) == 1:
            return parts
        if not variable.trainable:
            return None
        if len(keys) > 1:
            raise ValueError(
                f"The path '{variable.path}' matches several keys of `layout_map`, and "
                f"may match one: {keys}."
            )
        raise ValueError(
            f"layout_map[{keys[0]!r}]={parts} does not fit the variable "
            f"'{variable.path}' of the shape {shape}: a layout has one number for each "
            "dimension, which divides its size."
        )

    def warn_unused(self) -> None:
        """Warn once of entries that match nothing, when training begins.

        It is no error: a model that is made later may use them.
        """
        for key in self._unused:
            nearest = difflib.get_close_matches(key, self._trained, 3, 0.0)
            logger.warning(
                "layout_map[%r] splits nothing: the expression is found in no path of "
                "the variables that were made so far. The nearest paths of weights: "
                "%s. Each logical device has all of what no entry is for.",
                key,
                ", ".join(map(repr, nearest)) or "none",
            )
        self._unused.clear()

    def _keys_of(self, path: str) -> list[str]:
        if path in self.parts:
            return [path]
        if self._keys is None:
            return [key for key in self.parts if re.search(key, path)]
        layout = self._keys[path]  # an error if several match
        return [key for key in self.parts if layout is self._keys[key]][:1]


def _sizes(layout_map: Any, key: str) -> tuple[int, ...]:
    """Return a Keras layout's number of parts per dimension, by its mesh."""
    layout = layout_map[key]
    mesh = layout.device_mesh
    if mesh is None:
        raise ValueError(
            "A keras.distribution.LayoutMap must have a device mesh, whose axes tell "
            f"how many parts there are. Received none for layout_map[{key!r}]"
        )
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return tuple(1 if axis is None else int(sizes[axis]) for axis in layout.axes)
