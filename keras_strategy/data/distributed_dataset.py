"""Distributed datasets and iterators, for custom training loops."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import BatchRows
from keras_strategy.data.prefetch import SourceStates
from keras_strategy.errors import WorkersDifferError
from keras_strategy.values import PerReplica


class ReplicaParts(list[Any]):
    """One element of a distributed dataset: a list of each local replica's part."""

    # True if all replicas of all workers get arrays of the same shapes and dtypes.
    alike: bool | None = None
    # None if the arrays of a part differ in their number of rows.
    rows: BatchRows | None = None

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the element, with each array's parts replaced by `place(parts)`."""
        return tree.map_structure(lambda *leaves: place(leaves), *self)


class EvenParts:
    """`ReplicaParts` of a batch that local replicas share equally, without slices."""

    alike = True

    def __init__(self, batch: Any, arrays: list[Any], rows: int, replicas: int):
        self._batch = batch
        self._arrays = arrays
        self._replicas = replicas
        self.rows = BatchRows()
        self.rows.counts = (rows // replicas,) * replicas

    def placed(self, place: Callable[[Sequence[Any]], Any]) -> Any:
        leaves = [
            None if array is None else place(EvenRows(array, self._replicas))
            for array in self._arrays
        ]
        return tree.pack_sequence_as(self._batch, leaves)


class EvenRows(Sequence[Any]):
    """An array as a sequence of equal parts, sliced on access."""

    __slots__ = ("_parts", "array")

    def __init__(self, array: Any, parts: int):
        self.array = array
        self._parts = parts

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._parts:
            raise IndexError(index)
        rows = self.array.shape[0] // self._parts
        return self.array[index * rows : (index + 1) * rows]


class PerReplicaSpec(PerReplica):
    """Shapes and dtypes of a distributed tensor, equal to those of another one."""

    value_type = PerReplica

    def _key(self) -> Any:
        is_keras = isinstance(self.values[0], keras.KerasTensor)
        return tuple((x.shape, x.dtype) if is_keras else x for x in self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class DistributedDataset:
    """A dataset whose elements are split over the replicas of a strategy.

    `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function` create it. Each iteration reads the
    dataset from its beginning.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    batches = [np.ones((4, 3), "float32"), np.ones((2, 3), "float32")]
    rows = 0
    for x in strategy.experimental_distribute_dataset(batches):
        for part in strategy.experimental_local_results(x):
            rows += part.shape[0]
    assert rows == 6
    ```
    """

    # What `fit` reads instead: see `splitting.keras_dataset`.
    _global_batches: Any = None
    # None where native tf.distribute reads the data.
    _sources: SourceStates | None = None

    def __init__(
        self,
        strategy: Strategy,
        start: Callable[[], Iterator[Any]],
        sources: SourceStates,
    ):
        self._strategy = strategy
        self._start = start
        self._sources = sources
        # The iterator that has read the first element for `element_spec`.
        self._peeked: DistributedIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        """Start reading the dataset.

        Returns:
            A `DistributedIterator`.

        Raises:
            RuntimeError: In another strategy's scope, inside a function that `run`
                calls, or if the dataset is an exhausted iterator.
        """
        context.require_cross_replica(self._strategy, "DistributedDataset.__iter__")
        get_engine().require_eager_loop()
        iterator, self._peeked = self._peeked, None
        return iterator or DistributedIterator(
            self._strategy, self._start(), self._require_sources()
        )

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element, with None for the batch dimension.

        The element's structure, with a `PerReplica` of `keras.KerasTensor` in place of
        each distributed tensor; of `tf.TensorSpec` for `tf.data` datasets on
        TensorFlow. Reads the first element to find out.
        """
        if self._peeked is None:
            self._peeked = iter(self)
        return self._peeked.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combine all elements into one value.

        Args:
            initial_state: The state before the first element.
            reduce_func: Called with the state and an element; returns the new state.

        Returns:
            The last state.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        dataset = strategy.experimental_distribute_dataset([np.ones(4, "float32")] * 3)
        total = dataset.reduce(
            0.0, lambda state, x: state + strategy.reduce("SUM", x, axis=0)
        )
        assert float(total) == 12.0
        ```
        """
        return functools.reduce(reduce_func, self, initial_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current iteration: before the next element.

        Prefetched elements do not count as read. With several workers, each has its own
        state.

        Returns:
            The argument for `load_state_dict`, in this process or another: JSON values,
            apart from the states that the sources report themselves.

        Raises:
            NotImplementedError: If native tf.distribute reads the dataset.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        batches = [np.ones(4, "float32") * i for i in range(3)]
        dataset = strategy.experimental_distribute_dataset(batches)
        for x in dataset:
            break
        state = dataset.state_dict()

        again = strategy.experimental_distribute_dataset(batches)
        again.load_state_dict(state)
        assert len(list(again)) == 2
        assert len(list(again)) == 3
        ```
        """
        return self._require_sources().state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration continue where `state_dict` was called.

        Args:
            state: The return value of `state_dict`, for a dataset of the same data.

        Raises:
            NotImplementedError: If native tf.distribute reads the dataset.
            ValueError: If it is the state of another dataset.
        """
        self._require_sources().restore(state)
        self._peeked = None

    def _require_sources(self) -> SourceStates:
        if self._sources is None:
            raise NotImplementedError(
                "Native tf.distribute reads a `tf.data.Dataset` on TensorFlow, and "
                "does not report its position. Count the steps, and continue with "
                "`dataset.skip(steps)`, of a dataset that shuffles with "
                f"`reshuffle_each_iteration=False`. Received: {self!r}"
            )
        return self._sources

    def __repr__(self) -> str:
        return f"{type(self).__name__}(strategy={self._strategy!r})"


class DistributedIterator:
    """Iterator over the elements of a `DistributedDataset`.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    dataset = strategy.experimental_distribute_dataset([np.ones((4, 3), "float32")])
    iterator = iter(dataset)
    x = next(iterator)
    assert not iterator.get_next_as_optional().has_value()
    ```
    """

    def __init__(
        self, strategy: Strategy, elements: Iterator[Any], sources: SourceStates
    ):
        self._strategy = strategy
        self._sources = sources
        self._elements = elements
        self._peeked: list[Any] = []  # at most one element
        self._spec: Any = None

    def __iter__(self) -> "DistributedIterator":
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
            StopIteration: If there is none.
        """
        context.require_cross_replica(self._strategy, "DistributedIterator.__next__")
        get_engine().require_eager_loop()
        if self._peeked:
            self._sources.before_peek = None
            return self._peeked.pop()
        return next(self._elements)

    def get_next(self) -> Any:
        """Return the next element.

        Returns:
            The structure of the dataset's element, with a `PerReplica` in place of each
            array; with one replica, a tensor.

        Raises:
            StopIteration: If there is none. Inside a `tf.function`, TensorFlow raises
                its OutOfRangeError. `get_next_as_optional` raises nothing.
        """
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Return the next element, or an empty optional at the end.

        Returns:
            An object with `has_value()` and `get_value()`.
        """
        try:
            return OptionalElement([next(self)])
        except StopIteration:
            return OptionalElement([])

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes, as `DistributedDataset.element_spec` returns them."""
        if self._spec is None:
            positions = self._sources.state()["sources"]
            try:
                element = next(self)
            except StopIteration:
                raise ValueError(
                    "A distributed dataset reads its first element to find out its "
                    "`element_spec`, and it has no element."
                ) from None
            self._peeked.append(element)
            self._sources.before_peek = positions
            self._spec = tree.map_structure(_spec_of, element)
        return self._spec


class OptionalElement:
    """Element of a dataset, or none: a list of one, or an empty list."""

    def __init__(self, elements: Sequence[Any]):
        self._elements = elements

    def has_value(self) -> Any:
        """Return True if there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            ValueError: If there is none.
        """
        if not self._elements:
            raise ValueError("The dataset has ended: ask `has_value()` first.")
        return self._elements[0]


def start_batch_check(
    cluster: Cluster, arguments: Sequence[Any]
) -> Callable[[], None] | None:
    """Exchange the numbers of elements while a step runs; return their comparison."""
    for leaf in arguments:  # in each `run`, so only nested arguments are flattened
        if isinstance(leaf, tuple | list | dict):
            return start_batch_check(cluster, tree.flatten(arguments))
        if isinstance(leaf, PerReplica) and leaf.number is not None:
            break
    else:
        return None
    numbers = cluster.batch_numbers
    numbers.append(leaf.number)
    # A message takes time: in the first eight steps, then in each sixteenth.
    step = next(cluster.elements)
    if step >= 8 and step % 16:
        return None
    wait = cluster.start_exchange("the batches of strategy.run", numbers[:])
    numbers.clear()

    def compare() -> None:
        received = wait()
        if any(other != received[0] for other in received):
            raise WorkersDifferError(
                "All workers must pass `strategy.run` the same elements of a "
                "distributed dataset, and skip the same ones. The last steps have "
                "combined rows of different elements. Received elements of these "
                f"numbers since the last check: {cluster.format_by_worker(received)}."
            )

    return compare


def place_element(group: Any, parts: ReplicaParts | EvenParts, number: int) -> Any:
    def place(leaves):
        if leaves[0] is None and all(leaf is None for leaf in leaves):
            return None
        try:
            value = group.place(leaves, parts.alike)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The Keras backend '{keras.backend.backend()}' cannot make "
                "tensors of the arrays of a distributed dataset. Received arrays of "
                f"dtype {leaves[0].dtype}."
            ) from error
        if isinstance(value, PerReplica):
            value.batch, value.number = parts.rows, number
        return value

    return parts.placed(place)


def _spec_of(value: Any) -> Any:
    """Return the spec of a distributed tensor, with None for the batch dimension."""
    if value is None:
        return None
    if isinstance(value, PerReplica):
        return PerReplicaSpec([_spec_of(component) for component in value.values])
    shape = tuple(value.shape)
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.KerasTensor((None, *shape[1:]) if shape else (), dtype)
