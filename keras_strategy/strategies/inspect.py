"""Reports: device placement, memory use, and the profile of a training step."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from keras_strategy.keras_patches.variables_optimizers import byte_count, variables_of
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
        whole: Paths of the variables that should be sharded but cannot, since no
            factor of the number of replicas divides one of their dimensions. Scalars
            are not listed.
        partly: Paths of those with fewer shards than replicas, with the number of
            shards.
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


def _memory_report(strategy: "Strategy", model: keras.Model) -> MemoryReport:
    """Implement `Strategy.memory_report`."""
    owner = ownership.strategy_of_model(model)
    if owner is not strategy:
        raise ValueError(
            "`memory_report` needs a model that was created in the strategy's scope. "
            f"Received: the model '{model.name}' of {owner!r}"
        )
    extended = strategy.extended
    trained = {id(variable) for variable in model.trainable_variables}
    kinds: dict[str, list[Any]] = {"parameters": [], "others": [], "slots": []}
    for name, variable in variables_of(model, metrics=False).items():
        kind = "others" if name.startswith("model/") else "slots"
        kinds["parameters" if id(variable) in trained else kind].append(variable)

    def on_each_device(variables: Iterable[Any]) -> tuple[int, ...]:
        sizes = [extended.group.local_bytes(variable) for variable in variables]
        no_bytes = (0,) * len(extended.worker_devices)
        return tuple(map(sum, zip(no_bytes, *sizes, strict=True)))

    sharded_kinds = {"optimizer": ("slots",), "parameters": ("slots", "parameters")}
    single = strategy.num_replicas_in_sync == 1
    to_shard = () if single else sharded_kinds.get(strategy.shard or "", ())
    shardable = [variable for kind in to_shard for variable in kinds[kind]]
    specs = {variable.path: shard_spec_of(variable) for variable in shardable}
    return MemoryReport(
        extended.worker_devices,
        **{kind: on_each_device(variables) for kind, variables in kinds.items()},
        shard=strategy.shard,
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


_UNITS = ("B", "kB", "MB", "GB", "TB")


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
            return "".join(f"<{tag}>{_html(cell)}</{tag}>" for cell in cells)

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows)
        return (
            f"<table><caption>{_html(self.title)}</caption>"
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
        return _placement_of_strategy(value)
    if isinstance(value, keras.Model):
        return _placement_of_model(value)
    if isinstance(value, keras.Variable):
        strategy = ownership.strategy_of_variable(value)
        components = _components(strategy, value)
        title = f"variable {value.path!r}, aggregation {value.aggregation!r}"
        return _placement_of_components(title, strategy, components)
    return _placement_of_value(value)


def _placement_of_strategy(strategy: Any) -> Placement:
    replicas = strategy.num_replicas_in_sync
    title = (
        f"{type(strategy).__name__} on {keras.backend.backend()}: {replicas} "
        f"{'replica' if replicas == 1 else 'replicas'} in all"
    )
    rows = tuple((str(replica), device) for replica, device in _replicas(strategy))
    return Placement(title, ("replica", "device"), rows)


def _placement_of_model(model: keras.Model) -> Placement:
    strategy = ownership.strategy_of_model(model)
    optimizer = getattr(model, "optimizer", None)
    groups = {
        "trainable": model.trainable_variables,
        "not trainable": model.non_trainable_variables,
        "optimizer": optimizer.variables if optimizer is not None else [],
    }
    components = {
        name: [_components(strategy, variable) for variable in variables]
        for name, variables in groups.items()
    }
    central = getattr(strategy, "parameter_device", None)
    if central is not None:
        title = f"model {model.name!r} of {type(strategy).__name__}, kept on one device"
        sizes = [sum(_bytes(v.value) for v in group) for group in groups.values()]
        sizes = [_in_units(size) for size in (*sizes, sum(sizes))]
        return Placement(title, ("device", *groups, "all"), ((central, *sizes),))
    rows = []
    for i, (replica, device) in enumerate(_replicas(strategy)):
        sizes = [
            sum(_bytes(by_replica[i]) for by_replica in variables)
            for variables in components.values()
        ]
        sizes = [_in_units(size) for size in (*sizes, sum(sizes))]
        rows.append((str(replica), device, *sizes))
    owner = type(strategy).__name__ if strategy is not None else "no strategy"
    columns = ("replica", "device", *groups, "all")
    return Placement(f"model {model.name!r} of {owner}", columns, tuple(rows))


def _placement_of_value(value: Any) -> Placement:
    leaves = tree.flatten(value)
    counts = {
        len(leaf.values) for leaf in leaves if isinstance(leaf, DistributedValues)
    }
    if len(counts) > 1:
        raise ValueError(
            "Expected values of one strategy. Received values with different numbers "
            f"of components: {sorted(counts)}"
        )
    count = counts.pop() if counts else 1
    # A value does not record its strategy: assume the current one.
    strategy = context.get_strategy() if context.has_strategy() else None
    if strategy is not None and len(strategy.extended.topology.devices) != count:
        strategy = None
    if len(leaves) == 1:
        (leaf,) = leaves
        parts = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
        return _placement_of_components(type(leaf).__name__, strategy, parts)
    rows = []
    for i, (replica, device) in enumerate(_replicas(strategy, count)):
        parts = [
            leaf.values[i] if isinstance(leaf, DistributedValues) else leaf
            for leaf in leaves
        ]
        size = _in_units(sum(map(_bytes, parts)))
        rows.append((str(replica), device, str(len(parts)), size))
    columns = ("replica", "device", "values", "bytes")
    return Placement(f"{len(leaves)} values", columns, tuple(rows))


def _placement_of_components(title: str, strategy: Any, components: Any) -> Placement:
    rows = [
        (str(replica), device, _shape(part), _dtype(part), _in_units(_bytes(part)))
        for (replica, device), part in zip(
            _replicas(strategy, len(components)), components, strict=True
        )
    ]
    columns = ("replica", "device", "shape", "dtype", "bytes")
    return Placement(title, columns, tuple(rows))


def _components(strategy: Any, variable: keras.Variable) -> tuple[Any, ...]:
    """Return a variable's component for each local replica, whoever created it."""
    owner = ownership.strategy_of_variable(variable)
    if owner is not None:
        return owner.experimental_local_results(variable)
    # Created outside every scope: one value, which all replicas of a strategy read.
    copies = (
        len(strategy.extended.topology.local_replicas) if strategy is not None else 1
    )
    return (variable.value,) * copies


def _replicas(strategy: Any, count: int = 1) -> Iterator[tuple[int, str]]:
    """Return the index and the device of each local replica."""
    if strategy is None:
        devices = ("this process",) if count == 1 else ("unknown",) * count
        return enumerate(devices)
    extended = strategy.extended
    return zip(extended.topology.local_replicas, extended.topology.devices, strict=True)


def _shape(part: Any) -> str:
    return str(tuple(getattr(part, "shape", ())))


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
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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
        collectives: Collectives in a step.
        bytes: Bytes that one replica contributes to them in a step.
        gradient_bytes: Bytes of one copy of the model's gradients; None for a
            function.
        compilations: Programs that a step compiled again; should be 0.
        copies: Copies between host and devices, and between devices, in a step.
        computing: Fraction of the time in which a device computed. None if the
            backend has no profiler that reports it.
        collecting: Fraction in which it was in collectives without computing,
            including the wait for other replicas. None in the same case.
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
            ("step time", f"{1000 * self.seconds:.2f} ms"),
            ("calling thread", f"{_percent(self.calling_thread)} at work"),
            ("collectives", sent),
            ("compiled again", f"{self.compilations:g} programs"),
            ("copies", f"{self.copies:g}"),
        ]
        if self.computing is None or self.collecting is None:
            rows.append(("shares", "not reported by this backend's profiler"))
        else:
            neither = max(0.0, 1 - self.computing - self.collecting)
            rows += [
                ("computing", f"{_percent(self.computing)} of the time"),
                ("in collectives", f"{_percent(self.collecting)}, including waits"),
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
    """Count and time what a training step does.

    This trains: it calls `fit` of a model on rows of `x` and `y`, or the function, 40
    times and more. Several workers must call it together. Counts are what the backend
    was asked to do; times are those of this worker's first device.

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

    train(_SHORT)  # builds and compiles
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

        arrays = tree.map_structure(rows, (x, y) if y is not None else (x,))
        model.fit(*arrays, batch_size=batch_size, verbose=0)

    return train


def _calls(fn: Callable[[], Any]) -> Callable[[int], None]:
    def train(steps: int) -> None:
        result = None
        for _ in range(steps):
            result = fn()
        # Reading the result waits for the computation.
        for leaf in tree.flatten(result):
            parts = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
            for part in parts:
                if keras.ops.is_tensor(part):
                    keras.ops.convert_to_numpy(part)

    return train


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
        return _memory_report(self, model)
