"""The batches of `fit` and its like, as Keras's loops read them."""

from typing import Any

from keras import tree

from keras_strategy.hooks.hook import home_of
from keras_strategy.input import splitting
from keras_strategy.input.sources import ReadOnce, as_array

GeneratorDataAdapter: Any = home_of(
    "GeneratorDataAdapter",
    "keras.src.trainers.data_adapters.generator_data_adapter",
).GeneratorDataAdapter
ArrayDataAdapter: Any = home_of(
    "ArrayDataAdapter", "keras.src.trainers.data_adapters.array_data_adapter"
).ArrayDataAdapter


def for_keras(argument: Any, strategy: Any, method: str) -> Any:
    """An argument of `fit` or its like, as something that Keras can read.

    Args:
        argument: The argument.
        strategy: The strategy of the model, or None.
        method: The method's name.
    """
    data = splitting.for_keras(argument, strategy, method)
    return _Batches(data) if isinstance(data, splitting.GlobalBatches) else data


def counts_of_arrays(adapter: Any) -> list[Any] | None:
    """What is known of a `fit`'s batches before it reads them, if they are arrays.

    Args:
        adapter: Keras's adapter of the data.

    Returns:
        How many batches there are, their rows, and those of a last partial one.
    """
    if not isinstance(adapter, ArrayDataAdapter):
        return None
    return [adapter.num_batches, adapter.batch_size, adapter.partial_batch_size]


class _Batches(GeneratorDataAdapter):
    """Lets Keras's loop read the global batches of a distributed dataset.

    Args:
        data: The batches; every epoch starts to read them anew.
    """

    def __init__(self, data: splitting.GlobalBatches):
        def batches():
            for batch in data.start():
                batch = tree.map_structure(lambda leaf: as_array(leaf, "it"), batch)
                batch = tuple(batch) if isinstance(batch, list) else batch
                yield batch if isinstance(batch, tuple) else (batch,)

        super().__init__(batches())
        self._number = data.number
        if not isinstance(data.start, ReadOnce):
            self.generator = batches

    @property
    def num_batches(self):
        return self._number
