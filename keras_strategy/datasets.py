"""Datasets whose elements are split over the replicas, for loops of one's own."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_strategy import context
from keras_strategy.backends import get_backend
from keras_strategy.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from keras_strategy.input_sources import (
    as_array,
    batches_of,
    has_fixed_shapes,
    is_tf_dataset,
    number_of_batches,
)
from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.step import rows_of
from keras_strategy.values import PerReplica

if TYPE_CHECKING:
    from keras_strategy.strategy import Strategy

# The parts of one element: what each replica gets of it, in their order.
Parts = list[Any]

_BATCH_FIRST = (
    "The elements must be batches; make them of single rows first, with "
    "`dataset.batch(global_batch_size)` or the like."
)


class DistributedDataset:
    """A dataset whose elements are split over the replicas of a strategy.

    `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function` make it. Each iteration over it reads
    the dataset from its beginning.

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

    # What `fit` reads in its place: see `for_keras`.
    _global_batches: Any = None

    def __init__(self, strategy: "Strategy", start: Callable[[], Iterator[Parts]]):
        self._strategy = strategy
        self._start = start
        self._opened: DistributedIterator | None = None

    def __iter__(self) -> "DistributedIterator":
        """Starts reading the dataset.

        Returns:
            A `DistributedIterator`.

        Raises:
            RuntimeError: In another strategy's scope, inside a function that `run`
                calls, or where an iterator that was distributed has ended.
        """
        context.require_cross_replica(self._strategy, "DistributedDataset.__iter__")
        get_backend().require_loop_in_python()
        iterator, self._opened = self._opened, None
        return iterator or DistributedIterator(self._strategy, self._start())

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element, with None for the rows.

        The element's structure, with a `PerReplica` of `keras.KerasTensor` in the
        place of each distributed tensor; of `tf.TensorSpec` for `tf.data` datasets on
        TensorFlow. It is found out by reading the first element.
        """
        if self._opened is None:
            self._opened = iter(self)
        return self._opened.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combines all elements into one value.

        Args:
            initial_state: What to begin with.
            reduce_func: Called with the state and an element, returns the new state.

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(strategy={self._strategy!r})"


class DistributedIterator:
    """Gives the elements of a `DistributedDataset`, one after the other.

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

    def __init__(self, strategy: "Strategy", parts: Iterator[Parts]):
        self._strategy = strategy
        self._parts = parts
        self._ahead: list[Any] = []  # at most one element
        self._spec: Any = None

    def __iter__(self) -> "DistributedIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next element.

        Raises:
            StopIteration: If there is none.
        """
        context.require_cross_replica(self._strategy, "DistributedIterator.__next__")
        get_backend().require_loop_in_python()
        if self._ahead:
            return self._ahead.pop()
        parts = next(self._parts)
        group = self._strategy.extended.group

        def place(*leaves):
            if all(leaf is None for leaf in leaves):
                return None
            try:
                return group.place(leaves)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The Keras backend '{keras.backend.backend()}' cannot make "
                    "tensors of what a distributed dataset holds. Received arrays of "
                    f"the dtype {leaves[0].dtype}."
                ) from error

        return tree.map_structure(place, *parts)

    def get_next(self) -> Any:
        """Returns the next element.

        Returns:
            The structure of the dataset's element, with a `PerReplica` in the place
            of each array; with one replica, a tensor.

        Raises:
            StopIteration: If there is none. Inside a `tf.function`, TensorFlow raises
                its OutOfRangeError. `get_next_as_optional` raises nothing.
        """
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Returns the next element, or that there is none.

        Returns:
            An object with `has_value()` and `get_value()`.
        """
        try:
            return OptionalElement([next(self)])
        except StopIteration:
            return OptionalElement([])

    @property
    def element_spec(self) -> Any:
        """See `DistributedDataset.element_spec`."""
        if self._spec is None:
            optional = self.get_next_as_optional()
            if not optional.has_value():
                raise ValueError(
                    "A distributed dataset finds out its `element_spec` by reading "
                    "the first element, and there is none."
                )
            self._ahead.append(optional.get_value())
            self._spec = tree.map_structure(_spec, self._ahead[0])
        return self._spec


class OptionalElement:
    """An element of a dataset, or none.

    Args:
        elements: A list of the element, or an empty list.
    """

    def __init__(self, elements: Sequence[Any]):
        self._elements = elements

    def has_value(self) -> Any:
        """Returns whether there is an element."""
        return bool(self._elements)

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            ValueError: If there is none.
        """
        if not self._elements:
            raise ValueError("The dataset has ended: ask `has_value()` first.")
        return self._elements[0]


def distribute(
    strategy: "Strategy", dataset: Any, options: InputOptions | None
) -> DistributedDataset:
    """See `Strategy.experimental_distribute_dataset`."""
    argument = "Argument `dataset`"
    _check(strategy, "experimental_distribute_dataset", options, dataset, argument)
    if options and (
        options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    ):
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is for "
            "`distribute_datasets_from_function`: a dataset of global batches is read "
            f"once for all replicas. Received: options={options!r}"
        )
    start = batches_of(dataset, argument)
    native = get_backend().distribute_natively(strategy, [dataset], True, options)
    replicas = strategy.num_replicas_in_sync

    def parts() -> Iterator[Parts]:
        batches = start()
        return (_split(batch, replicas, argument) for batch in batches)

    result = native or DistributedDataset(strategy, parts)
    result._global_batches = (
        dataset
        if is_tf_dataset(dataset)
        else GlobalBatches(start, number_of_batches(dataset))
    )
    return result


def distribute_from_function(
    strategy: "Strategy",
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> DistributedDataset:
    """See `Strategy.distribute_datasets_from_function`."""
    if not callable(dataset_fn):
        raise TypeError(
            "Argument `dataset_fn` must be a function of an InputContext that returns "
            f"a dataset. Received: dataset_fn={dataset_fn!r} of type "
            f"{type(dataset_fn).__name__}"
        )
    _check(strategy, "distribute_datasets_from_function", options)
    replicas = strategy.num_replicas_in_sync
    per_replica = options is not None and (
        options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    )
    pipelines = replicas if per_replica else 1
    datasets = [
        dataset_fn(InputContext(pipelines, i, replicas)) for i in range(pipelines)
    ]
    argument = "What `dataset_fn` returned"
    for dataset in datasets:
        _check(strategy, "distribute_datasets_from_function", None, dataset, argument)
    starts = [batches_of(dataset, argument) for dataset in datasets]
    native = get_backend().distribute_natively(strategy, datasets, False, options)
    partial = not all(map(has_fixed_shapes, datasets))

    def parts() -> Iterator[Parts]:
        iterators = [start() for start in starts]
        turns = iterators if per_replica else iterators * replicas
        return _rounds(turns, partial, argument)

    result = native or DistributedDataset(strategy, parts)
    counts = [number_of_batches(dataset) for dataset in datasets]
    known = [count for count in counts if count is not None]
    rounds = None
    if len(known) == len(counts) and per_replica:
        rounds = max(known) if partial else min(known)
    elif len(known) == len(counts):
        rounds = (known[0] + (replicas - 1 if partial else 0)) // replicas
    result._global_batches = GlobalBatches(lambda: map(_joined, parts()), rounds)
    return result


@dataclass
class GlobalBatches:
    """The batches of all replicas, for Keras's own loop.

    Attributes:
        start: Starts to read them.
        number: How many there are, None if that is not known.
    """

    start: Callable[[], Iterator[Any]]
    number: int | None


def for_keras(dataset: Any, strategy: "Strategy | None", method: str) -> Any:
    """What Keras's `fit` and its like read in the place of a distributed dataset.

    They split global batches themselves.

    Args:
        dataset: Any argument of `fit`, which is returned if it is not distributed.
        strategy: The strategy of the model, None for none.
        method: "fit" or the like.

    Returns:
        A `tf.data.Dataset` of global batches, or `GlobalBatches`.

    Raises:
        ValueError: If another strategy distributed the dataset.
    """
    if not isinstance(dataset, DistributedDataset):
        return dataset
    if dataset._strategy is not (strategy or context.default_strategy()):
        raise ValueError(
            f"`{method}` was given a dataset that {dataset._strategy!r} distributed, "
            f"and the model belongs to {strategy or 'no strategy'!r}. Give `{method}` "
            "the dataset as it was before, or make the model in the scope of that "
            "strategy."
        )
    return dataset._global_batches


def _check(
    strategy: "Strategy",
    method: str,
    options: Any,
    dataset: Any = None,
    argument: str = "",
) -> None:
    context.require_cross_replica(strategy, method)
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(
            "Argument `options` must be an InputOptions or None. Received: "
            f"options={options!r} of type {type(options).__name__}"
        )
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            f"{argument} has been distributed already. Iterate over it as it is. "
            f"Received: {dataset!r}"
        )


def _split(batch: Any, replicas: int, argument: str) -> Parts:
    """Each replica's rows of a global batch."""
    batch = tree.map_structure(lambda leaf: as_array(leaf, argument), batch)
    try:
        bounds = split_rows(rows_of(batch), replicas)
    except ValueError as error:
        raise ValueError(f"{argument}: {error} {_BATCH_FIRST}") from None
    return [
        tree.map_structure(
            lambda leaf, b=begin, e=end: None if leaf is None else leaf[b:e], batch
        )
        for begin, end in bounds
    ]


def _rounds(
    iterators: Sequence[Iterator[Any]], partial: bool, argument: str
) -> Iterator[Parts]:
    """The elements that the replicas take in turn.

    In the last round there may be too few. The replicas that come last then get the
    element of the first without its rows; tf.distribute drops such a round where all
    elements have one shape (`partial` is False), and so does this where an element
    has no rows to leave out.
    """
    missing = object()
    while True:
        elements = [next(iterator, missing) for iterator in iterators]
        there = [element for element in elements if element is not missing]
        if not there:
            return
        there = [
            tree.map_structure(lambda leaf: as_array(leaf, argument), element)
            for element in there
        ]
        for element in there[1:]:
            _require_same_structure(there[0], element, argument)
        if len(there) < len(elements):
            arrays = [leaf for leaf in tree.flatten(there[0]) if leaf is not None]
            if not partial or any(len(leaf.shape) == 0 for leaf in arrays):
                return
        empty = tree.map_structure(_without_rows, there[0])
        real = iter(there)
        yield [empty if e is missing else next(real) for e in elements]


def _joined(parts: Parts) -> Any:
    """The global batch of all replicas' parts."""

    def join(*leaves):
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)
        return keras.ops.concatenate(leaves)

    return tree.map_structure(join, *parts)


def _without_rows(leaf: Any) -> Any:
    return None if leaf is None or len(leaf.shape) == 0 else leaf[:0]


def _require_same_structure(first: Any, other: Any, argument: str) -> None:
    try:
        tree.assert_same_structure(first, other)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{argument} must give elements of one structure. Received elements of "
            f"different ones: {error}"
        ) from error


def _spec(value: Any) -> Any:
    """What is known of a distributed tensor before it is there."""
    if value is None:
        return None
    if isinstance(value, PerReplica):
        return PerReplica([_spec(component) for component in value.values])
    shape = tuple(value.shape)
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.KerasTensor((None, *shape[1:]) if shape else (), dtype)
