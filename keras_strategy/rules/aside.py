"""Arrays that wait on the disk until a file is written of all of them.

What the replicas share is brought together one variable at a time. A host that kept all
of them until the last is there would need memory for what no device has.
"""

import pathlib
import shutil
from types import TracebackType

import numpy as np

# Smaller ones stay in memory.
LEAST_BYTES = 2**16


class Aside:
    """Keeps arrays in files, as long as it is open.

    What a process leaves that is killed, the next removes that keeps something there.

    Args:
        folder: Where they are, and nothing else. None on workers that keep nothing.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder, self._count = folder, 0
        self._error: OSError | None = None

    @classmethod
    def beside(cls, path: pathlib.Path) -> "Aside":
        """One in the folder where a path is to be written."""
        return cls(path.parent / f".{path.name}.aside")

    def keep(self, array: np.ndarray) -> np.ndarray:
        """The array, of which a large one is read from the disk when it is looked at.

        If the disk cannot take it, `check` tells: all workers are to go on together.
        """
        if self._error is not None or self._folder is None:
            return np.empty(0, array.dtype)
        if not array.ndim or array.nbytes < max(LEAST_BYTES, 1):
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
        """Raises what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Aside":
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
