"""The process's own seed generator, as the replicas of a strategy draw from it.

It has one variable, which no replica may write, and `keras.utils.set_random_seed` has
another one made in its place. So a strategy has two generators of its own: the
process's, with one variable that all programs know, and one with a component for each
replica. In each run the replicas begin with what the process's holds, and it goes on
where they end.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers
from keras_strategy.hooks.random import keep_generator, kept_generator
from keras_strategy.hooks.variables import stored


class Seeds:
    """The seed generators of one strategy.

    Args:
        beside: Calls a function eagerly while the replicas wait, in the strategy's
            scope or in none: `beside(fn, in_scope)`.
        workers: The processes that the replicas belong to, or None for this one alone.

    Attributes:
        process: The process's own, once a replica has asked for it.
        replicas: That of the replicas.
        taken: How often a run has begun to draw.
    """

    def __init__(self, beside: Callable[..., Any], workers: TensorFlowWorkers | None):
        self._beside = beside
        self._workers = workers
        self.process: Any = None
        self.replicas: Any = None
        self.taken = 0

    def renew(self) -> None:
        """Before a program runs that draws: the generator may be another by now."""
        current = kept_generator()
        if current is not self.process:
            self.take(current)
            keep_generator(self.process)

    def take(self, current: Any) -> None:
        """Makes `process` go on where the process's generator is.

        Args:
            current: The generator that Keras has for the thread that called `run`, or
                None.
        """
        self.taken += 1
        if self.process is None or current is not self.process:
            self._beside(lambda: self._take(current), in_scope=False)
        if self.replicas is None:

            def make():
                self.replicas = keras.random.SeedGenerator(0, name="replicas_seed")

            self._beside(make)

    def give_back(self, state: Any) -> None:
        """Makes the process's generator go on where the replicas end.

        Args:
            state: What one of them holds.
        """
        stored(self.process.state).assign(state)
        keep_generator(self.process)

    def _take(self, current: Any) -> None:
        if current is None:
            current = keras.random.SeedGenerator()
        state = tf.convert_to_tensor(stored(current.state))
        if self._workers is not None:
            (chiefs,) = self._workers.take_chiefs("the seed generator", [state])
            state = state if chiefs is None else chiefs
        if self.process is None:
            self.process = keras.random.SeedGenerator(0, name="seed_generator")
        stored(self.process.state).assign(state)
