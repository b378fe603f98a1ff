"""Ports: short forms of programs that others wrote.

It keeps what the program does with Keras and with a strategy, on data that ships in a
package or is made up. It trains under a strategy, or on one device, and returns all
that came of it. What the source draws at random it draws, seeded: first weights, the
order of rows, noise and dropout in a step.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import LOGS, WEIGHTS, largest, scope, train

BACKEND = keras.backend.backend()
PURE = {"jax": "its step has side effects, which Keras does not support on JAX"}


@dataclass
class Outcome:
    """Result of a program; all of it is compared.

    Attributes:
        weights: Arrays.
        logs: Numbers.
        predictions: Arrays.
    """

    weights: Sequence[Any]
    logs: Sequence[Any]
    predictions: Sequence[Any] = ()


@dataclass(frozen=True)
class Port:
    """A program of others, as a function.

    Attributes:
        train: Takes a strategy, or None for one device.
        source: Where the program is found.
        needs: A package that is not of this project's.
        not_on: The backends on which one device cannot run it, with the reason.
        refused: What the error must say on the backends where several replicas are
            refused.
        workers: Whether each replica is a process.
        coordinator: Whether a coordinator trains it with workers, whose number it takes
            in the place of a strategy.
        sample: Whether `make test` runs it.
    """

    train: Callable[[Any], Outcome]
    source: str
    needs: str | None = None
    not_on: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    workers: bool = False
    coordinator: bool = False
    sample: bool = False

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def missing(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


def port(source: str, **options: Any) -> Callable[[Callable], Port]:
    """Make a port of a function, with further attributes of `Port`."""
    return lambda train: Port(train, source, **options)


def differences(one: Outcome, many: Outcome) -> tuple[float, float, float]:
    """Return the largest differences in weights, logs and predictions."""
    return (
        largest(one.weights, many.weights),
        largest(one.logs, many.logs),
        largest(one.predictions, many.predictions),
    )


TOLERANCES = (WEIGHTS, LOGS, LOGS)


def fitted(
    strategy: Any, make: Callable[[], keras.Model], x: Any, y: Any = None, **fit: Any
) -> Outcome:
    """Trains a model that is made and compiled in the scope."""
    done = train(strategy, make, x, y, predicted=None, **fit)
    assert not done.apart, f"the replicas' variables differ by {done.apart}"
    return Outcome(
        [*done.weights, *done.optimizer],
        list(done.logs.values()),
        keras.tree.flatten(done.predictions),
    )


def stepped(
    strategy: Any, make: Callable[[], keras.Model], x: Any, y: Any = None, **fit: Any
) -> Outcome:
    """Trains a model with a `train_step` that does not predict anything."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = make()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, **fit).history
    return Outcome(model.get_weights(), list(history.values()))


class Tracked(keras.Model):
    """Model whose `train_step` updates means that it creates, as many examples have.

    Attributes:
        names: The names of the means.
    """

    names: Sequence[str] = ("loss",)

    def __init__(self):
        super().__init__()
        self.means = [keras.metrics.Mean(name=name) for name in self.names]

    @property
    def metrics(self):
        return self.means

    def log(self, *values: Any) -> dict[str, Any]:
        """Update the means and return their results by name."""
        for mean, value in zip(self.means, values, strict=True):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}

    def apply_step(self, variables: Any, loss_of: Callable) -> dict[str, Any]:
        """Train by a loss, and return the logs of a model of one mean."""
        return self.log(step_of(self.optimizer, variables, loss_of))


def step_of(optimizer: Any, variables: Any, loss_of: Callable, has_aux=False) -> Any:
    """Apply gradients as `tape.gradient` and `apply_gradients` do in the examples."""
    result, gradients = ks.value_and_grad(loss_of, variables, has_aux=has_aux)()
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return result


def gradient_by(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return the differentiable gradient of a sum of outputs by inputs."""
    if BACKEND == "jax":
        import jax

        return jax.grad(lambda x: keras.ops.sum(fn(x)))(x)
    if BACKEND == "torch":
        import torch

        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = fn(x)
    return tape.gradient(outputs, x)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Return a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def compiled(model: keras.Model, *args: Any, **options: Any) -> keras.Model:
    """Compile a model, and return it."""
    model.compile(*args, **options)
    return model


def dense(inputs: int, outputs: int, units: int = 8) -> keras.Model:
    """Return a network with one hidden layer."""
    hidden, out = keras.layers.Dense(units, "tanh"), keras.layers.Dense(outputs)
    return keras.Sequential([keras.Input((inputs,)), hidden, out])


def sgd() -> keras.optimizers.Optimizer:
    """Return SGD for attention, whose keys' bias has no gradient but rounding.

    Adam, which the sources use, scales that up to whole steps.
    """
    return keras.optimizers.SGD(0.05, momentum=0.9)


def digits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8 x 8 pixels, and the number that each shows."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    images = (found.images[:rows, ..., np.newaxis] / 16).astype("float32")
    return images, found.target[:rows].astype("int32")


def vectors(rows: int, *sizes: int, seed: int = 0) -> list[np.ndarray]:
    """Made-up rows of some numbers each."""
    rng = np.random.RandomState(seed)
    return [rng.randn(rows, size).astype("float32") for size in sizes]


def words(rows: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up texts, and a class of two for each."""
    rng = np.random.RandomState(2)
    return rng.randint(1, vocabulary, (rows, length)), rng.randint(0, 2, rows)


ROWS = 21  # by batches of 8 the last one has 5
X, Y = vectors(ROWS, 4, 1)
TEXT, SENTIMENT = words(ROWS, 6, 9)
LOGITS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
