"""Reports: memory use, and the profile of a training step."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.internals import byte_count
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.sharding import is_sharded, shard_spec_of
from keras_strategy.values import DistributedValues

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model's variables on the devices of this worker.

    Attributes:
        devices: The devices' names, in the order of all other fields.
        parameters: The trainable weights.
        others: The model's other variables, such as moving statistics and seeds.
        slots: The optimizers' variables.
        shard: The strategy's `shard` option.
        whole: Paths of the variables that cannot be sharded, since no factor of the
            number of replicas divides one of their dimensions; without scalars.
        partly: The number of shards by path, of those with fewer than replicas.
    """

    devices: tuple[str, ...]
    parameters: tuple[int, ...]
    others: tuple[int, ...]
    slots: tuple[int, ...]
    shard: str | None
    whole: tuple[str, ...]
    partly: Mapping[str, int]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("device", "parameters", "others", "slots", "total")
        ]
        for device, *numbers in zip(
            self.devices, self.parameters, self.others, self.slots, strict=True
        ):
            rows.append((device, *(f"{n:,}" for n in (*numbers, sum(numbers)))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"Bytes on each device, with shard={self.shard!r}:"]
        for first, *others in rows:
            cells = (text.rjust(w) for text, w in zip(others, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        if self.whole:
            lines.append(f"Whole on every device: {', '.join(self.whole)}")
        if self.partly:
            partly = (f"{path} ({shards})" for path, shards in self.partly.items())
            lines.append(f"In fewer parts than devices: {', '.join(partly)}")
        return "\n".join(lines)


# Steps of the shorter of two calls. Their difference excludes the fixed cost of a call.
_SHORT = 3


@dataclass(frozen=True)
class StepProfile:
    """Profile of a training step, as returned by `profile`. Prints as a table.

    Attributes:
        title: What was profiled.
        seconds: Time of a step, measured without a profiler.
        calling_thread: Fraction of it in which the calling thread was busy, with
            Python or with the backend's computation in this thread.
        collectives: Collectives in a step, or None if unknown.
        gradient_bytes: Bytes of one copy of a model's gradients, or None.
        computing: Fraction of the time in which a device computed, or None if unknown.
        collecting: Fraction in which it was in collectives without computing,
            including the wait for other replicas, or None.
    """

    title: str
    seconds: float
    calling_thread: float
    collectives: float | None
    gradient_bytes: int | None
    computing: float | None
    collecting: float | None

    def __str__(self) -> str:
        rows = [
            ("step time", f"{1000 * self.seconds:.2f} ms"),
            ("calling thread", f"{100 * self.calling_thread:3.0f} % at work"),
        ]
        if self.collectives is not None:
            rows.append(("collectives", f"{self.collectives:g} in a step"))
        if self.gradient_bytes is not None:
            rows.append(("gradients", f"{self.gradient_bytes:,} bytes"))
        if self.computing is None or self.collecting is None:
            rows.append(("shares", "not reported by this backend's profiler"))
        else:
            neither = max(0.0, 1 - self.computing - self.collecting)
            rows += [
                ("computing", f"{100 * self.computing:3.0f} % of the time"),
                ("in collectives", f"{100 * self.collecting:3.0f} %, including waits"),
                ("neither", f"{100 * neither:3.0f} %: Python, input, other threads"),
            ]
        return "\n".join([self.title, *(f"  {name:16}{what}" for name, what in rows)])


def profile(
    model_or_fn: keras.Model | Callable[[], Any],
    x: Any = None,
    y: Any = None,
    batch_size: int = 32,
    steps: int = 20,
) -> StepProfile:
    """Time what a training step does, and count its collectives.

    This trains: it calls `fit` of a model on rows of `x` and `y`, or the function, 40
    times and more. Several workers must call it together. Times and collectives are
    those of this worker's first device.

    Args:
        model_or_fn: A compiled model, or a function without arguments that does one
            step, such as `lambda: strategy.run(step, args=batch)`.
        x: Arrays of the model's inputs; only for a model.
        y: Arrays of its targets; only for a model.
        batch_size: Rows of a global batch; only for a model.
        steps: The number of steps to profile.

    Returns:
        A `StepProfile`, which prints as a table.

    Raises:
        TypeError: If data is passed with a function, or a model without data.
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
    strategy = gradient_bytes = None
    if isinstance(model_or_fn, keras.Model):
        model = model_or_fn
        if x is None:
            raise TypeError(
                "Expected `x`, the rows that the model is trained on, with a model. "
                "Received: x=None"
            )
        train = functools.partial(_fit, model, x, y, batch_size)
        strategy = ownership.strategy_of_model(model)
        title = f"fit of the model '{model.name}', {batch_size} rows a step"
    else:
        if not callable(model_or_fn) or x is not None or y is not None:
            raise TypeError(
                "Expected a model with `x`, or a function without arguments alone. "
                f"Received: {model_or_fn!r}, x={type(x).__name__}"
            )
        train = functools.partial(_call, model_or_fn)
        title = f"a call of {getattr(model_or_fn, '__name__', model_or_fn)!r}"
    title += f", with {keras.backend.backend()}"
    if strategy is not None:
        count = strategy.num_replicas_in_sync
        title += f" on {count} {'replica' if count == 1 else 'replicas'}"

    train(_SHORT)  # builds and compiles
    train(_SHORT + steps)
    begin, at_work = time.perf_counter(), time.thread_time()
    train(steps)
    seconds = time.perf_counter() - begin
    at_work = time.thread_time() - at_work
    engine = get_engine()
    short, long = (engine.profile(train, n) for n in (_SHORT, _SHORT + steps))
    if isinstance(model_or_fn, keras.Model):  # built by now
        gradient_bytes = sum(map(byte_count, model_or_fn.trainable_variables))
    return StepProfile(
        title,
        seconds=seconds / steps,
        calling_thread=at_work / seconds,
        collectives=long and short and (long.collectives - short.collectives) / steps,
        gradient_bytes=gradient_bytes,
        computing=long and long.computing,
        collecting=long and long.collecting,
    )


def _fit(model: Any, x: Any, y: Any, batch_size: int, steps: int) -> None:
    def rows(array: Any) -> Any:
        array = np.asarray(array)
        return array[np.arange(steps * batch_size) % len(array)]

    arrays = tree.map_structure(rows, (x, y) if y is not None else (x,))
    model.fit(*arrays, batch_size=batch_size, verbose=0)


def _call(fn: Callable[[], Any], steps: int) -> None:
    result = None
    for _ in range(steps):
        result = fn()
    # Reading the result waits for the computation.
    for leaf in tree.flatten(result):
        parts = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
        for part in filter(keras.ops.is_tensor, parts):
            keras.ops.convert_to_numpy(part)


class Reports:
    """Methods of `Strategy` that report on it."""

    def memory_report(self: "Strategy", model: keras.Model) -> MemoryReport:
        """Return the bytes of a model's variables on each device of this worker.

        Args:
            model: A model that was created in the scope. Its optimizer's slots count
                once they exist, after `fit` or `optimizer.build`.

        Returns:
            A `MemoryReport`, which prints as a table.

        Raises:
            ValueError: If the model belongs to another strategy.

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
        owner = ownership.strategy_of_model(model)
        if owner is not self:
            raise ValueError(
                "`memory_report` needs a model that was created in the strategy's "
                f"scope. Received: the model '{model.name}' of {owner!r}"
            )
        kinds: dict[str, list[Any]] = {"parameters": [], "others": [], "slots": []}
        trained = {id(variable) for variable in model.trainable_variables}
        for name, variable in variables_of(model, metrics=False).items():
            kind = "others" if name.startswith("model/") else "slots"
            kinds["parameters" if id(variable) in trained else kind].append(variable)
        extended = self.extended

        def on_each_device(variables: Sequence[Any]) -> tuple[int, ...]:
            sizes = [extended.group.local_bytes(variable) for variable in variables]
            no_bytes = (0,) * len(extended.worker_devices)
            return tuple(map(sum, zip(no_bytes, *sizes, strict=True)))

        shardable = []
        if self.num_replicas_in_sync > 1 and self.shard is not None:
            shardable += kinds["slots"]
            if self.shard == "parameters":
                shardable += kinds["parameters"]
        specs = {variable.path: shard_spec_of(variable) for variable in shardable}
        return MemoryReport(
            extended.worker_devices,
            **{kind: on_each_device(variables) for kind, variables in kinds.items()},
            shard=self.shard,
            whole=tuple(
                variable.path
                for variable in shardable
                if len(variable.shape) and not is_sharded(variable)
            ),
            partly={
                path: spec.num_shards
                for path, spec in specs.items()
                if spec is not None and spec.num_shards < spec.replicas
            },
        )
