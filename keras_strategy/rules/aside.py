"""Arrays spilled to disk until one file is written of all of them.

Sharded variables are gathered one at a time. A host that kept all of them would need
memory for what no device holds.
"""

import pathlib
import shutil
from types import TracebackType

import numpy as np

# Smaller ones stay in memory.
MIN_SPILL_BYTES = 2**16


class ArraySpill:
    """Files of arrays, while it is open; leftovers of a killed process are removed.

    The folder must have no other use. It is None on workers that do not write.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder, self._count = folder, 0
        self._error: OSError | None = None

    @classmethod
    def next_to(cls, path: pathlib.Path) -> "ArraySpill":
        """Return a spill in a folder next to a path that will be written."""
        return cls(path.parent / f".{path.name}.aside")

    def add(self, array: np.ndarray) -> np.ndarray:
        """Return the array, memory-mapped from disk if it is large.

        A failure is raised by `check` only, so that all workers continue together.
        """
        if self._error is not None or self._folder is None:
            return np.empty(0, array.dtype)
        if not array.ndim or array.nbytes < max(MIN_SPILL_BYTES, 1):
            return array
        try:
            if not self._count:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
            file = self._folder / str(self._count)
            self._count += 1
            array.tofile(file)
            # Engines may ask for memory to write to; the file keeps what it has.
            return np.memmap(file, array.dtype, "c", shape=array.shape)
        except OSError as error:
            self._error = error
            return np.empty(0, array.dtype)

    def check(self) -> None:
        """Raise the first failed write's error, if any."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "ArraySpill":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._count, self._error = 0, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
