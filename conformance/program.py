"""Programs: a compiled model and a data set, registered by a decorator."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import keras

# N = 2 and N = 3 divide a full batch, and neither divides the last one, of 11 rows.
BATCH = 12
ROWS = 35
REPLICAS = (2, 3)


@dataclasses.dataclass(frozen=True)
class Data:
    """Arrays of a number of rows."""

    x: Any
    y: Any = None
    sample_weight: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A training that every system runs.

    Attributes:
        name: The name of the function that builds the model.
        family: The name of the module of that function.
        build: Returns a compiled model whose weights exist.
        data: Returns the arrays of a number of rows.
        rows: The number of rows with an uneven last batch.
        epochs: The epochs of the training.
        batch_size: The rows of a global batch.
        class_weight: The argument of `fit`.
        validation: The rows of the validation data.
        callbacks: Returns callbacks for `fit`. A loop by hand has none.
        needs_fit: The reason why a loop by hand cannot run this program as it is.
        not_on: The backends on which one device cannot run it, with the reason.
    """

    name: str
    family: str
    build: Callable[[], keras.Model]
    data: Callable[[int], Data]
    rows: int = ROWS
    epochs: int = 2
    batch_size: int = BATCH
    class_weight: Mapping[int, float] | None = None
    validation: int = 0
    callbacks: Callable[[], list[Any]] = list
    needs_fit: str = ""
    not_on: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def with_full_batches(self) -> "Program":
        """Return this program with full batches alone."""
        validation = 2 * self.batch_size if self.validation else 0
        return dataclasses.replace(
            self, rows=3 * self.batch_size, validation=validation
        )


_PROGRAMS: dict[str, Program] = {}


def program(data: Callable[[int], tuple], **options: Any) -> Callable:
    """Register a function that builds a compiled model as a program of its name.

    Args:
        data: Returns the arrays of a number of rows, as a tuple of `Data`.
        **options: Further attributes of `Program`.
    """

    def register(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        _register(build.__name__, build, data, **options)
        return build

    return register


def programs(data: Callable[[int], tuple], **builds: Callable[[], keras.Model]) -> None:
    """Register functions as programs of the same data, by name."""
    for name, build in builds.items():
        _register(name, build, data)


def _register(name: str, build: Callable, data: Callable, **options: Any) -> None:
    if name in _PROGRAMS:
        raise ValueError(
            f"Expected a function whose name no other program has. Received: {name!r}"
        )
    family = build.__module__.rpartition(".")[2]
    made = Program(name, family, build, lambda rows: Data(*data(rows)), **options)
    _PROGRAMS[name] = made


def all_programs() -> list[Program]:
    """Return every program of the modules in `conformance.programs`."""
    package = importlib.import_module("conformance.programs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(_PROGRAMS.values(), key=lambda p: (p.family, p.name))


def select(patterns: list[str]) -> list[Program]:
    """Return the programs whose name contains a pattern, or whose family is one.

    Raises:
        ValueError: If no program matches a pattern.
    """
    programs = all_programs()
    if not patterns:
        return programs
    for pattern in patterns:
        if not any(_matches(p, pattern) for p in programs):
            raise ValueError(
                "Expected `--only` to be a family or a part of a program's name. "
                f"Received: {pattern!r}. Families: "
                f"{', '.join(sorted({p.family for p in programs}))}"
            )
    return [p for p in programs if any(_matches(p, text) for text in patterns)]


def _matches(candidate: Program, pattern: str) -> bool:
    return pattern in candidate.name or pattern == candidate.family
