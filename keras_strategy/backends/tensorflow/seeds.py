"""Seed generators of a strategy, in place of the process's global one.

The global generator has one variable, which replicas may not write, and
`keras.utils.set_random_seed` replaces it. So a strategy has two generators of its own:
one in place of the process's, with a variable that all programs share, and one with a
component for each replica. In each run the replicas start from the former's state, and
it continues from the state in which they end.
"""

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers
from keras_strategy.hooks.random import keep_generator, kept_generator
from keras_strategy.hooks.variables import stored


class SeedGenerators:
    """Seed generators of one strategy.

    Args:
        call_outside: Calls a function eagerly while the replicas wait:
            `call_outside(fn, in_scope=True)`.
        workers: The workers, or None.

    Attributes:
        process: The process's generator; None until a replica draws.
        replicas: The replicas' generator; None until a replica draws.
        starts: How often a run has begun to draw.
    """

    def __init__(
        self, call_outside: Callable[..., Any], workers: TensorFlowWorkers | None
    ):
        self._call_outside = call_outside
        self._workers = workers
        self.process: Any = None
        self.replicas: Any = None
        self.starts = 0

    def refresh(self) -> None:
        """Follow `set_random_seed`, before a compiled program draws."""
        current = kept_generator()
        if current is not self.process:
            self.start(current)
            keep_generator(self.process)

    def start(self, current: Any) -> None:
        """Make `process` continue from the global generator's state.

        Args:
            current: Keras's generator in the thread that called `run`, or None.
        """
        self.starts += 1
        if self.process is None or current is not self.process:
            self._call_outside(lambda: self._copy_state(current), in_scope=False)
        if self.replicas is None:

            def create():
                self.replicas = keras.random.SeedGenerator(0, name="replicas_seed")

            self._call_outside(create)

    def finish(self, state: Any) -> None:
        """Make `process` continue from the state in which the replicas ended."""
        stored(self.process.state).assign(state)
        keep_generator(self.process)

    def _copy_state(self, current: Any) -> None:
        if current is None:
            current = keras.random.SeedGenerator()
        state = tf.convert_to_tensor(stored(current.state))
        if self._workers is not None:
            (chiefs,) = self._workers.broadcast_if_different("the seed generator", [state])
            state = state if chiefs is None else chiefs
        if self.process is None:
            self.process = keras.random.SeedGenerator(0, name="seed_generator")
        stored(self.process.state).assign(state)


def has_seed() -> bool:
    """Return True if the process has a global seed, which tf.data shuffles by."""
    return context.global_seed() is not None


def random_state() -> tuple[int, tuple]:
    """Return TensorFlow's global seed and the state of the seeds drawn from it.

    A process without a global seed gets one. Otherwise its operations would draw their
    seeds from the machine, which no other worker can reproduce.
    """
    if not has_seed():
        tf.random.set_seed(int.from_bytes(os.urandom(4)))
    return context.global_seed(), context.context()._rng.getstate()


def set_random_state(seed: int, drawn: tuple) -> None:
    """Restore a state that `random_state` returned."""
    if context.global_seed() != seed:
        tf.random.set_seed(seed)
    context.context()._rng.setstate(drawn)
