"""Proof that rows do not depend on each other, without which all workers read all rows.

A worker that reads only its own rows skips the others, so a row must not depend on the
rows read with it or before it. Nothing proves that of the user's function of a batch:
`row_independent` declares it. Reading a row is proven to have no effect if a digest of
all that the row's code can change is equal before and after the first batch.
"""

import contextlib
import ctypes
import hashlib
import inspect
import pickle
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_DECLARED = "_ks_row_independent"
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
# Bytes of a larger array whose rest is not compared, and of a digest that ends there.
_ARRAY_BYTES, _DIGEST_BYTES = 1 << 24, 1 << 27


def row_independent(data: T) -> T:
    """Declare that rows do not depend on each other, so that workers may skip rows.

    Where several workers read the same data, each skips the others' rows only if that
    is proven to change nothing. Declare it of a `collate_fn` that only stacks rows, or
    of a dataset with `__getitems__`, or one that counts, caches or draws as it reads.
    Polars declares the same of a function by `is_elementwise=True`.

    Args:
        data: A function, a dataset or its class.

    Returns:
        `data` itself: you can use `row_independent` as a decorator.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    @ks.row_independent
    def collate(rows):
        return tuple(map(np.stack, zip(*rows)))

    x, y = collate([([1.0, 2.0], 3.0), ([4.0, 5.0], 6.0)])
    assert x.shape == (2, 2)
    ```
    """
    setattr(data, _DECLARED, True)
    return data


def is_declared_independent(data: Any) -> bool:
    return getattr(data, _DECLARED, False)


class StateWatch:
    """Comparison of what reading rows can change: attributes, and random generators."""

    def __init__(self, dataset: Any):
        self._roots = [] if is_declared_independent(dataset) else [dataset]
        self._generators: list[Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Note the state before a batch is read."""
        self._before = self._state()

    def has_changed(self) -> bool:
        """Return True if the state has changed, or may have."""
        before, after = self._before, self._state()
        # After the first batch compare only generators, which takes little time.
        self._generators = self._found
        return before[1] is None or before != after

    def _state(self) -> tuple[Any, Any]:
        if self._generators is not None:
            own: Any = [_generator_state(generator) for generator in self._generators]
        else:
            digest = _StateDigest(self._roots)
            own, self._found = digest.digest, digest.generators
        return _process_state(), own


def _generator_state(generator: Any) -> Any:
    if hasattr(generator, "initial_seed"):
        return generator.get_state().numpy().tobytes()
    try:
        return pickle.dumps(generator, 5)
    except Exception:
        return object()  # equal to no other


def _process_state() -> Any:
    """Return the state of the random generators of Python, NumPy and torch."""
    torch = sys.modules.get("torch")
    state = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), _numpy_state(), state


# The last bits with which NumPy kept no second number of a pair of normal ones.
_bits_without_rest = b""


def _numpy_state() -> Any:
    global _bits_without_rest
    numpy_random: Any = np.random  # its types omit the generator
    generator = numpy_random.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return pickle.dumps(np.random.get_state(legacy=False))
    # NumPy takes 30 us to copy it: 624 words and a position.
    bits = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    if bits == _bits_without_rest:
        return bits, 0, 0.0
    has_rest, rest = numpy_random.get_state(legacy=True)[3:]
    if not has_rest:
        _bits_without_rest = bits
    return bits, has_rest, rest


class _StateDigest(pickle.Pickler):
    """Digest of objects and of all that they refer to; None if some state is hidden."""

    # The pickler only visits them. A function is described by what it can change: its
    # closure, and the globals that it names.
    def __init__(self, roots: list[Any]):
        self._hash, self._size, self._is_hidden = hashlib.sha256(), 0, False
        super().__init__(self, 5, buffer_callback=self._add_array)
        self.generators: list[Any] = []
        try:
            self.dump(roots)
        except Exception:
            self._is_hidden |= self._size <= _DIGEST_BYTES
        self.digest = None if self._is_hidden else self._hash.hexdigest()

    def write(self, data: Any) -> None:
        self._hash.update(data)
        self._size += len(data)
        if self._size > _DIGEST_BYTES:
            raise OverflowError

    def _add_array(self, buffer: pickle.PickleBuffer) -> None:
        self._hash.update(buffer.raw()[:_ARRAY_BYTES])

    def reducer_override(self, thing: Any) -> Any:
        if thing is list:
            return NotImplemented
        described: Any = None
        is_torch_generator = hasattr(type(thing), "initial_seed")
        if is_torch_generator or issubclass(type(thing), _GENERATORS):
            self.generators.append(thing)
        try:
            if isinstance(thing, type | types.FunctionType):
                described = [thing.__qualname__, *_references(thing)]
            elif is_torch_generator:
                described = _generator_state(thing)
            elif hasattr(thing, "data_ptr"):  # a tensor
                described = [thing.data_ptr(), thing._version]
            elif not isinstance(thing, types.ModuleType):
                described = thing.__reduce_ex__(5)
        except Exception:
            # A lock or a connection has no rows; what is iterated has a position.
            self._is_hidden |= isinstance(thing, Iterator)
        if isinstance(described, tuple):
            return described
        # As a list whose items come later, which ends cycles.
        return list, (), None, iter([described])


def _is_users(file: str | None) -> bool:
    """Return True for code outside of Python and of installed packages."""
    return file is not None and not file.startswith((*_LIBRARIES, "<frozen"))


def _references(code: Any) -> Iterator[Any]:
    """Yield what the user's class or function can change."""
    if isinstance(code, type):
        for parent in code.__mro__:
            module = sys.modules.get(parent.__module__)
            if _is_users(getattr(module, "__file__", None)):
                yield {k: v for k, v in vars(parent).items() if k != "__dict__"}
    elif _is_users(code.__code__.co_filename):
        yield code.__defaults__
        parts = [code.__code__]
        for part in parts:  # and those of functions inside
            parts += filter(inspect.iscode, part.co_consts)
            yield [code.__globals__.get(name) for name in part.co_names]
        for cell in code.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
