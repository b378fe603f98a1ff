"""What a strategy tells of itself: where its replicas are, and what a model takes."""

from typing import TYPE_CHECKING

import keras

from keras_strategy.strategies.memory import MemoryReport, report
from keras_strategy.strategies.placement import visualize

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


class Reports:
    """The methods that report, for `Strategy` to inherit."""

    def summary(self: "Strategy") -> None:
        """Prints the replicas of this worker, and their devices.

        Example:

        ```python
        import keras_strategy as ks

        ks.MirroredStrategy().summary()
        ```
        """
        print(visualize(self))

    def memory_report(self: "Strategy", model: keras.Model) -> MemoryReport:
        """Tells what a model's variables take on each device of this worker.

        Args:
            model: A model that was made in the scope. What its optimizer keeps counts
                when it has been made, which `fit` or `optimizer.build` does.

        Returns:
            The bytes, to be printed or read.

        Raises:
            ValueError: If the model is not this strategy's.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
        report = strategy.memory_report(model)
        assert report.parameters[0] == 16
        ```
        """
        return report(self, model)
