"""An element of a distributed dataset: what each replica of this worker gets of it."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import tree

from keras_strategy.core.row_range import BatchRows


class ReplicaParts(list[Any]):
    """The parts of one element: what each local replica gets of it, in their order.

    Attributes:
        alike: Whether all replicas, those of other workers included, get arrays of the
            same shapes and dtypes; None if that is not known.
        rows: The rows of the element; None if its arrays differ in that.
    """

    alike: bool | None = None
    rows: BatchRows | None = None

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """The element, with what `place` makes of the parts of each array."""
        return tree.map_structure(lambda *leaves: place(leaves), *self)


class EvenParts:
    """A batch of which each replica, all of them here, gets as many rows.

    Args:
        batch: The batch.
        arrays: What it holds, as arrays or tensors.
        replicas: The number of replicas.
    """

    alike = True

    def __init__(self, batch: Any, arrays: list[Any], replicas: int):
        self._batch = batch
        self._arrays = arrays
        self._replicas = replicas
        self.rows = BatchRows()
        for array in arrays:
            if array is not None:
                self.rows.counts = (array.shape[0] // replicas,) * replicas
                break

    def __len__(self) -> int:
        return self._replicas

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """See `Parts.placed`."""
        replicas = self._replicas
        leaves = [
            None if array is None else place(EvenRows(array, replicas))
            for array in self._arrays
        ]
        return tree.pack_sequence_as(self._batch, leaves)


class EvenRows(Sequence[Any]):
    """An array as parts of equal rows, which are cut when somebody looks at them.

    Attributes:
        whole: The array.

    Args:
        whole: The array.
        parts: How many there are.
    """

    __slots__ = ("_parts", "array")

    def __init__(self, whole: Any, parts: int):
        self.array = whole
        self._parts = parts

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._parts:
            raise IndexError(index)
        rows = self.array.shape[0] // self._parts
        return self.array[index * rows : (index + 1) * rows]
