"""Which device holds what: for people who look, in a terminal or a notebook."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from keras_strategy.core import context
from keras_strategy.rules import ownership
from keras_strategy.values.distributed import DistributedValues

_THIS_PROCESS = "this process"
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Placement:
    """What each replica of this worker holds; what `visualize` returns.

    It shows itself as a table: printed, by `rich`, and in a notebook.

    Args:
        title: What was looked at.
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
        # A table's own title is no wider than the table.
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
    """Shows which device holds what of a value, a variable, a model or a strategy.

    Args:
        value: What `strategy.run` returned or a distributed dataset gave, or any
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
    if hasattr(value, "experimental_local_results"):
        return _of_strategy(value)
    if isinstance(value, keras.Model):
        return _of_model(value)
    if isinstance(value, keras.Variable):
        strategy = ownership.strategy_of_variable(value)
        components = _components(strategy, value)
        title = f"variable {value.path!r}, aggregation {value.aggregation!r}"
        return _of_components(title, strategy, components)
    return _of_value(value)


def _of_strategy(strategy: Any) -> Placement:
    replicas = strategy.num_replicas_in_sync
    title = (
        f"{type(strategy).__name__} on {keras.backend.backend()}: {replicas} "
        f"{'replica' if replicas == 1 else 'replicas'} in all"
    )
    rows = tuple((str(number), device) for number, device in _replicas(strategy))
    return Placement(title, ("replica", "device"), rows)


def _of_model(model: keras.Model) -> Placement:
    strategy = ownership.strategy_of_model(model)
    optimizer = getattr(model, "optimizer", None)
    groups = {
        "trainable": model.trainable_variables,
        "not trainable": model.non_trainable_variables,
        "optimizer": optimizer.variables if optimizer is not None else [],
    }
    held = {
        name: [_components(strategy, variable) for variable in variables]
        for name, variables in groups.items()
    }
    central = getattr(strategy, "parameter_device", None)
    if central is not None:
        title = f"model {model.name!r} of {type(strategy).__name__}, kept on one device"
        kept = [sum(_bytes(v.value) for v in group) for group in groups.values()]
        sizes = [_in_units(size) for size in (*kept, sum(kept))]
        return Placement(title, ("device", *groups, "all"), ((central, *sizes),))
    rows = []
    for place, (number, device) in enumerate(_replicas(strategy)):
        of_group = [
            sum(_bytes(components[place]) for components in variables)
            for variables in held.values()
        ]
        sizes = (_in_units(size) for size in (*of_group, sum(of_group)))
        rows.append((str(number), device, *sizes))
    whose = type(strategy).__name__ if strategy is not None else "no strategy"
    columns = ("replica", "device", *groups, "all")
    return Placement(f"model {model.name!r} of {whose}", columns, tuple(rows))


def _of_value(value: Any) -> Placement:
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
    # A value does not say whose it is: the strategy in charge is asked for its devices.
    strategy = context.get_strategy() if context.has_strategy() else None
    if strategy is not None and len(strategy.extended.topology.devices) != count:
        strategy = None
    if len(leaves) == 1:
        (leaf,) = leaves
        parts = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
        return _of_components(type(leaf).__name__, strategy, parts)
    rows = []
    for place, (number, device) in enumerate(_replicas(strategy, count)):
        parts = [
            leaf.values[place] if isinstance(leaf, DistributedValues) else leaf
            for leaf in leaves
        ]
        size = _in_units(sum(map(_bytes, parts)))
        rows.append((str(number), device, str(len(parts)), size))
    columns = ("replica", "device", "values", "bytes")
    return Placement(f"{len(leaves)} values", columns, tuple(rows))


def _of_components(title: str, strategy: Any, components: Any) -> Placement:
    rows = [
        (str(number), device, _shape(part), _dtype(part), _in_units(_bytes(part)))
        for (number, device), part in zip(
            _replicas(strategy, len(components)), components, strict=True
        )
    ]
    columns = ("replica", "device", "shape", "dtype", "bytes")
    return Placement(title, columns, tuple(rows))


def _components(strategy: Any, variable: keras.Variable) -> tuple[Any, ...]:
    """What each replica holds of a variable, by whoever made it."""
    own = ownership.strategy_of_variable(variable)
    if own is not None:
        return own.experimental_local_results(variable)
    # Made outside of every scope: one value, which all replicas of a strategy read.
    copies = (
        len(strategy.extended.topology.local_replicas) if strategy is not None else 1
    )
    return (variable.value,) * copies


def _replicas(strategy: Any, count: int = 1) -> Iterator[tuple[int, str]]:
    """The number and the device of each replica of this worker."""
    if strategy is None:
        devices = (_THIS_PROCESS,) if count == 1 else ("not known",) * count
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
