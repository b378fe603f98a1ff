"""Models that the tests of a module share, since to compile one takes seconds."""

from collections.abc import Callable
from typing import Any

import keras

from conformance.compare import Trained, assert_equal, scope, train
from keras_strategy.training.ownership import strategy_of_model


def alone(make: Callable[[], keras.Model], x: Any, y: Any, **options: Any) -> Trained:
    """Return the result of one device; the options are those of `train`.

    On TensorFlow it compiles no step, which is quicker where a step runs a few times.
    """
    eagerly = keras.backend.backend() == "tensorflow"
    return train(None, make, x, y, eagerly=eagerly, **options)


def logged(caplog: Any) -> list[str]:
    """Return what this package logged, except that a first step takes long."""
    ours = [r.getMessage() for r in caplog.records if r.name == "keras_strategy"]
    return [message for message in ours if "has taken" not in message]


class SharedModels:
    """One model per strategy: what an engine compiles for it, it compiles once.

    Args:
        compiled: Returns a compiled model.
        batch: What it is first trained on: inputs and targets.
    """

    def __init__(self, compiled: Callable[[], keras.Model], batch: tuple):
        self._compiled, self._batch = compiled, batch
        self._models: dict[int, tuple] = {}

    def fresh(self, strategy: Any) -> keras.Model:
        """The model as it was when it was made, but that its metrics are built.

        A fit that builds them reads a batch ahead: a PyDataset's threads are then
        stopped, and what they had fetched by then comes first in the epoch, which is a
        matter of timing, on one device too.
        """
        replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        if replicas not in self._models:
            keras.utils.set_random_seed(1)
            with scope(strategy):
                model = self._compiled()
                model.optimizer.build(model.trainable_variables)
            state = [*model.variables, *model.optimizer.variables]
            first = [variable.numpy() for variable in state]
            model.train_on_batch(*self._batch)
            self._models[replicas] = model, state, first
        model, state, first = self._models[replicas]
        for variable, value in zip(state, first, strict=True):
            variable.assign(value)
        model.reset_metrics()
        model.stop_training = False
        keras.utils.set_random_seed(1)
        return model

    def equal(
        self, strategy: Any, x: Any, y: Any, batch_size: int, **fit: Any
    ) -> Trained:
        """Asserts that a strategy's training is one device's, and returns that."""
        fit = {"predicted": None, **fit}
        one = train(None, lambda: self.fresh(None), x, y, batch_size, **fit)
        model = self.fresh(strategy)
        own = strategy_of_model(model)  # an equal one
        assert_equal(one, train(own, lambda: model, x, y, batch_size, **fit))
        return one
