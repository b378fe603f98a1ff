"""Where the time of a step goes, and what travels: why it is not N times faster."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks.variables import byte_count
from keras_strategy.rules import ownership
from keras_strategy.values.distributed import DistributedValues

# Steps of the shorter of two calls, of which the difference is taken: what a call costs
# once is not in a step.
_SHORT = 3


@dataclass(frozen=True)
class StepProfile:
    """What a step of training does; what `profile` returns. Printed, it is a table.

    Attributes:
        title: What was looked at.
        seconds: How long a step took, without a profiler.
        calling_thread: The share of that in which the calling thread was at work: with
            Python, and with what the engine computes in it.
        collectives: Collectives of a step.
        bytes: What one replica gives to them in a step.
        gradient_bytes: The bytes of one copy of the model's gradients; None for a
            function.
        compilations: Programs that a step compiled again; 0 is what it should be.
        copies: Copies between host and devices, and between devices, in a step.
        computing: The share of the time in which a device computed. None where the
            engine has no profiler that says it.
        collecting: The share in which it was in collectives and did not compute, with
            waiting for the other replicas. None in the same case.
    """

    title: str
    seconds: float
    calling_thread: float
    collectives: float
    bytes: float
    gradient_bytes: int | None
    compilations: float
    copies: float
    computing: float | None
    collecting: float | None

    def __str__(self) -> str:
        sent = f"{self.collectives:g}, of {self.bytes:,.0f} bytes from each replica"
        if self.gradient_bytes is not None:
            sent += f" (its gradients are {self.gradient_bytes:,})"
        rows = [
            ("a step", f"{1000 * self.seconds:.2f} ms"),
            ("calling thread", f"{_percent(self.calling_thread)} at work"),
            ("collectives", sent),
            ("compiled again", f"{self.compilations:g} programs"),
            ("copies", f"{self.copies:g}"),
        ]
        if self.computing is None or self.collecting is None:
            rows.append(("shares", "this engine's profiler does not say them"))
        else:
            neither = max(0.0, 1 - self.computing - self.collecting)
            rows += [
                ("computing", f"{_percent(self.computing)} of the time"),
                ("in collectives", f"{_percent(self.collecting)}, with waiting"),
                ("neither", f"{_percent(neither)}: Python, input, other threads"),
            ]
        return "\n".join([self.title, *(f"  {name:16}{what}" for name, what in rows)])


def _percent(share: float) -> str:
    return f"{100 * share:3.0f} %"


def profile(
    model_or_fn: keras.Model | Callable[[], Any],
    x: Any = None,
    y: Any = None,
    batch_size: int = 32,
    steps: int = 20,
) -> StepProfile:
    """Counts and times what a step of training does.

    It trains: of a model it calls `fit` on rows of `x` and `y`, a function it calls as
    it is, 40 times and more. Several workers call it together. Counts are what the
    engine was told to do, times those of this worker's first device.

    Args:
        model_or_fn: A compiled model, or a function without arguments that does one
            step, such as `lambda: strategy.run(step, args=batch)`.
        x: Arrays of the model's inputs; for a model alone.
        y: Arrays of its targets; for a model alone.
        batch_size: Rows of a global batch; for a model alone.
        steps: How many steps are looked at.

    Returns:
        A `StepProfile`, which prints as a table.

    Raises:
        TypeError: If data comes with a function, or a model without.
        ValueError: If a number is not positive.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 3), "float32")
    print(ks.profile(model, x, x[:, :1], batch_size=16))
    ```
    """
    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number < 1:
            raise ValueError(f"Expected `{name}` to be positive. Received: {number!r}")
    if isinstance(model_or_fn, keras.Model):
        model: Any = model_or_fn
        if x is None:
            raise TypeError(
                "Expected `x`, the rows that the model is trained on, with a model. "
                "Received: x=None"
            )
        train = _fit(model, x, y, batch_size)
        strategy = ownership.strategy_of_model(model)
        title = f"fit of the model '{model.name}', {batch_size} rows a step"
    else:
        if not callable(model_or_fn) or x is not None or y is not None:
            raise TypeError(
                "Expected a model with `x`, or a function without arguments alone. "
                f"Received: {model_or_fn!r}, x={type(x).__name__}"
            )
        model, strategy, train = None, None, _calls(model_or_fn)
        title = f"a call of {getattr(model_or_fn, '__name__', model_or_fn)!r}"
    title += f", with {keras.backend.backend()}"
    if strategy is not None:
        replicas = strategy.num_replicas_in_sync
        title += f" on {replicas} {'replica' if replicas == 1 else 'replicas'}"

    train(_SHORT)  # it builds, and compiles
    train(_SHORT + steps)
    begin, at_work = time.perf_counter(), time.thread_time()
    train(steps)
    seconds = time.perf_counter() - begin
    at_work = time.thread_time() - at_work
    engine = get_engine()
    short, long = (engine.count_operations(train, n) for n in (_SHORT, _SHORT + steps))
    counts = [(b - a) / steps for a, b in zip(short, long, strict=True)]
    collectives, sent, compilations, copies = counts
    shares = engine.compute_and_comm_fractions(train, steps) or (None, None)
    weights = None if model is None else model.trainable_variables
    return StepProfile(
        title,
        seconds=seconds / steps,
        calling_thread=at_work / seconds,
        collectives=collectives,
        bytes=sent,
        gradient_bytes=None if weights is None else sum(map(byte_count, weights)),
        compilations=compilations,
        copies=copies,
        computing=shares[0],
        collecting=shares[1],
    )


def _fit(model: Any, x: Any, y: Any, batch_size: int) -> Callable[[int], None]:
    def train(steps: int) -> None:
        def rows(array: Any) -> Any:
            array = np.asarray(array)
            return array[np.arange(steps * batch_size) % len(array)]

        some = tree.map_structure(rows, (x, y) if y is not None else (x,))
        model.fit(*some, batch_size=batch_size, verbose=0)

    return train


def _calls(fn: Callable[[], Any]) -> Callable[[int], None]:
    def train(steps: int) -> None:
        result = None
        for _ in range(steps):
            result = fn()
        # It is not done before somebody has read it.
        for leaf in tree.flatten(result):
            parts = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
            for part in parts:
                if keras.ops.is_tensor(part):
                    keras.ops.convert_to_numpy(part)

    return train
