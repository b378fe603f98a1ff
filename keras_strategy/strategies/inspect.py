"""Reports: device placement, memory use, and the profile of a training step."""

import functools
import html
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.internals import byte_count
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.sharding import flat_shards_of, is_sharded, shard_spec_of
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


@dataclass(frozen=True)
class Placement:
    """Values of each replica of this worker, as returned by `visualize`.

    It displays as a table when printed, by `rich`, and in a notebook.

    Args:
        title: The table's title.
        columns: The names of the columns.
        rows: One for each replica of this worker, with a text for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __rich__(self) -> Group:
        table = Table()
        for column in self.columns:
            table.add_column(escape(column), overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        # A title in the table would wrap at the table's width.
        return Group(escape(self.title), table)

    def __repr__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            texts = (html.escape(cell, quote=False) for cell in cells)
            return "".join(f"<{tag}>{text}</{tag}>" for text in texts)

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows)
        return (
            f"<table><caption>{html.escape(self.title, quote=False)}</caption>"
            f"<thead><tr>{row(self.columns, 'th')}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


def visualize(value: Any) -> Placement:
    """Show which device holds which part of a value, variable, model or strategy.

    Args:
        value: The output of `strategy.run`, an element of a distributed dataset, or any
            structure of such values; a variable; a model; or a strategy.

    Returns:
        A table of this worker's replicas, to be printed or shown in a notebook.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    print(ks.visualize(model))  # each device holds 4 floats, 16 B
    ```
    """
    if isinstance(value, Reports):
        backend = keras.backend.backend()
        title = f"{type(value).__name__} on {backend}: {_count_replicas(value)} in all"
        return _by_replica(title, (), value, [()] * _count_components(value))
    if isinstance(value, keras.Model):
        return _placement_of_model(value)
    if isinstance(value, keras.Variable):
        strategy = ownership.strategy_of_variable(value)
        title = f"variable {value.path!r}, aggregation {value.aggregation!r}"
        if flat_shards_of(value) is not None:
            return _placement_of_shards(title, strategy, value)
        components = _components(strategy, value)
        return _placement_of_components(title, strategy, components)
    return _placement_of_value(value)


def _placement_of_model(model: keras.Model) -> Placement:
    strategy = ownership.strategy_of_model(model)
    owner = "no strategy" if strategy is None else type(strategy).__name__
    title = f"model {model.name!r} of {owner}"
    optimizer = getattr(model, "optimizer", None)
    groups = {
        "trainable": model.trainable_variables,
        "not trainable": model.non_trainable_variables,
        "optimizer": optimizer.variables if optimizer is not None else [],
    }

    def in_units(sizes: Iterable[Iterable[int]]) -> list[str]:
        sums = list(map(sum, sizes))
        return [_in_units(size) for size in (*sums, sum(sums))]

    columns = (*groups, "all")
    central = getattr(strategy, "parameter_device", None)
    if central is not None:
        sizes = [[_bytes(v.value) for v in group] for group in groups.values()]
        row = (central, *in_units(sizes))
        return Placement(f"{title}, kept on one device", ("device", *columns), (row,))
    local = [[_local_bytes(strategy, v) for v in group] for group in groups.values()]
    cells = [
        in_units([sizes[i] for sizes in group] for group in local)
        for i in range(_count_components(strategy))
    ]
    return _by_replica(title, columns, strategy, cells)


def _placement_of_shards(title: str, strategy: Any, variable: Any) -> Placement:
    shards: Any = flat_shards_of(variable)
    bounds = [shards.bounds[r] for r in strategy.extended.local_replicas]
    sizes = strategy.extended.group.local_bytes(variable)
    cells = [
        (f"{begin} to {end} of {shards.shape}", _dtype(variable), _in_units(size))
        for (begin, end), size in zip(bounds, sizes, strict=True)
    ]
    return _by_replica(title, ("elements", "dtype", "bytes"), strategy, cells)


def _local_bytes(strategy: Any, variable: Any) -> Sequence[int]:
    """Return a variable's bytes on each local replica."""
    owner = ownership.strategy_of_variable(variable)
    if owner is not None and flat_shards_of(variable) is not None:
        return owner.extended.group.local_bytes(variable)
    return list(map(_bytes, _components(strategy, variable)))


def _placement_of_value(value: Any) -> Placement:
    leaves = tree.flatten(value)
    counts = {len(x.values) for x in leaves if isinstance(x, DistributedValues)}
    if len(counts) > 1:
        raise ValueError(
            "Expected values of one strategy. Received values with different numbers "
            f"of components: {sorted(counts)}"
        )
    count = counts.pop() if counts else 1
    # A value does not record its strategy: assume the current one.
    strategy = context.current_scope()
    if strategy is not None and _count_components(strategy) != count:
        strategy = None
    local = [
        [x.values[i] if isinstance(x, DistributedValues) else x for x in leaves]
        for i in range(count)
    ]
    if len(leaves) == 1:
        title = type(leaves[0]).__name__
        return _placement_of_components(title, strategy, [leaf for (leaf,) in local])
    cells = [(str(len(leaves)), _in_units(sum(map(_bytes, x)))) for x in local]
    return _by_replica(f"{len(leaves)} values", ("values", "bytes"), strategy, cells)


def _placement_of_components(title: str, strategy: Any, components: Any) -> Placement:
    cells = [
        (str(tuple(getattr(x, "shape", ()))), _dtype(x), _in_units(_bytes(x)))
        for x in components
    ]
    return _by_replica(title, ("shape", "dtype", "bytes"), strategy, cells)


def _by_replica(
    title: str, columns: Sequence[str], strategy: Any, cells: Sequence[Sequence[str]]
) -> Placement:
    """Return a table with the index, the device and the cells of each local replica."""
    if strategy is None:
        replicas = range(len(cells))
        devices = ["this process" if len(cells) == 1 else "unknown"] * len(cells)
    else:
        topology = strategy.extended.topology
        replicas, devices = topology.local_replicas, topology.devices
    rows = [
        (str(replica), device, *texts)
        for replica, device, texts in zip(replicas, devices, cells, strict=True)
    ]
    return Placement(title, ("replica", "device", *columns), tuple(rows))


def _components(strategy: Any, variable: keras.Variable) -> tuple[Any, ...]:
    """Return a variable's component for each local replica, whoever created it."""
    owner = ownership.strategy_of_variable(variable)
    if owner is not None:
        return owner.experimental_local_results(variable)
    # Created outside every scope: one value, which all replicas of a strategy read.
    return (variable.value,) * _count_components(strategy)


def _count_components(strategy: Any) -> int:
    return 1 if strategy is None else len(strategy.extended.topology.devices)


def _count_replicas(strategy: Any) -> str:
    replicas = strategy.num_replicas_in_sync
    return f"{replicas} {'replica' if replicas == 1 else 'replicas'}"


def _dtype(part: Any) -> str:
    dtype = getattr(part, "dtype", None)
    if dtype is None:
        return type(part).__name__
    return keras.backend.standardize_dtype(dtype)


def _bytes(part: Any) -> int:
    if getattr(part, "dtype", None) is None:
        return 0
    bits = "".join(filter(str.isdigit, _dtype(part).partition("_")[0]))
    return math.prod(getattr(part, "shape", ())) * (int(bits or 8) // 8)


def _in_units(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


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
        title += f" on {_count_replicas(strategy)}"

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

    def summary(self: "Strategy") -> None:
        """Print the replicas of this worker and their devices.

        Example:

        ```python
        import keras_strategy as ks

        ks.MirroredStrategy().summary()
        ```
        """
        print(visualize(self))

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
