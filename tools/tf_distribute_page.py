"""Write docs/tf_distribute.md, which says of every name of tf.distribute what it does.

    python tools/tf_distribute_page.py            the page, of the names on record
    python tools/tf_distribute_page.py --names    the record too, of this TensorFlow

The record, tf_distribute_names.tsv beside this file, lets a process without TensorFlow
compare its names and parameters as well. What is said of a name is in `SAID`; a name
that is not in it works, with tf.distribute's parameters.
"""

import csv
import dataclasses
import enum
import fnmatch
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.registry import UnsupportedName
from keras_strategy.errors import TENSORFLOW_ONLY
from keras_strategy.strategies.base import Strategy

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tf_distribute.md"
RECORD = Path(__file__).with_name("tf_distribute_names.tsv")
FIELDS = ("name", "kind", "parameters")
BACKENDS = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}
SPECIAL = ("__init__", "__enter__", "__iter__", "__next__")

HEAD = """\
# Every name of tf.distribute

The public names of `tf.distribute` in TensorFlow {version}, {count} in all, and what
each does here, as a name of `keras_strategy`. *Works*: it is there, and takes
tf.distribute's parameters in their order. *Differs*: it works in another way, which
the note or the page [Differences](differences.md) says. *Refused*: an error gives the
reason of the note, and says what to use.

The members of a refused class are refused for the same reason. A member that does
the same as in the base class is listed there alone; the note names the base.

`make names` writes this page. The tests compare it with the installed TensorFlow, and
what it says of a backend with what that does.
"""


@dataclasses.dataclass(frozen=True)
class Status:
    """The support of a name on a backend.

    Attributes:
        word: As it stands in the page.
        note: What the user should know.
        anchor: The section of docs/differences.md that says more.
    """

    word: str
    note: str = ""
    anchor: str = ""

    @property
    def cell(self) -> str:
        """The word in the table of the page."""
        if not self.anchor:
            return self.word
        return f"[{self.word}](differences.md#{self.anchor})"


WORKS = Status("works")


def differs(note: str, anchor: str = "") -> Status:
    """Return a note that the name works in another way."""
    return Status("differs", note, anchor)


def refused(reason: str) -> Status:
    """Return a note that the name raises an error, with the reason."""
    return Status("refused", reason)


def _refused_of(pattern: str, cls: type) -> dict[str, Status]:
    return {
        f"{pattern}.{name}": refused(value.reason)
        for name, value in vars(cls).items()
        if isinstance(value, UnsupportedName)
    }


def _of_tensorflow(names: dict[str, str]) -> dict[str, dict[str, Status]]:
    """Return a note that the name is TensorFlow's there, and refused elsewhere."""
    said = {}
    for pattern, name in names.items():
        elsewhere = refused(TENSORFLOW_ONLY[name])
        said[pattern] = {"jax": elsewhere, "torch": elsewhere, "tensorflow": WORKS}
    return said


_ENGINE_DECIDES = differs(
    "The engine decides how values travel; a line in the log says so.",
    "other-names",
)

# Who says nothing of a backend leaves it to the next.
_NOT_ON_JAX = {
    "torch": refused(
        "torch has no replicas of several devices, and its TPUs are not supported. "
        "Use KERAS_BACKEND=jax, or `MirroredStrategy` here."
    ),
    "tensorflow": refused(
        "native TPUStrategy traces a step once for all replicas, but the exact "
        "results of this package need a trace for each replica with its rows. Use "
        "KERAS_BACKEND=jax; or `tf.distribute.TPUStrategy` itself, with which "
        "Keras trains without this package."
    ),
}

# Of each pattern what is said on all backends, or for some; the first that fits counts.
SAID: dict[str, Status | dict[str, Status]] = {
    "TPUStrategy*": _NOT_ON_JAX,
    "experimental.TPUStrategy*": _NOT_ON_JAX,
    "experimental.TPUStrategy": differs("It warns that it is old."),
    "experimental.TPUStrategy.__init__": differs("It warns that it is old."),
    "TPUStrategy.experimental_assign_to_logical_device": differs(
        "It checks the number: XLA decides what computes where.", "other-names"
    ),
    "experimental.PreemptionCheckpointHandler": differs(
        "A `ks.CheckpointManager` is saved on every backend.",
        "other-names",
    ),
    "experimental.PreemptionCheckpointHandler.watch_preemption_scope": differs(
        "It does nothing: there, TPUs need it."
    ),
    "experimental.PreemptionWatcher": differs("It watches this process's SIGTERM."),
    "experimental.PreemptionWatcher.block_until_worker_exit": differs(
        "It does nothing: there, TPUs need it."
    ),
    **{
        f"{pattern}coordinator.ClusterCoordinator{name}": dict.fromkeys(
            ("jax", "torch"), differs(note, "other-names")
        )
        for pattern in ("", "experimental.")
        for name, note in (
            ("", "Its workers are Dask's, or those that it starts."),
            (".__init__", "Its workers are Dask's, or those that it starts."),
            (".schedule", "What a function is to assign, it returns."),
            (".create_per_worker_dataset", "A worker makes it when it first needs it."),
        )
    },
    **_of_tensorflow(
        {
            "ParameterServerStrategy*": "ParameterServerStrategy",
            "experimental.ParameterServerStrategy*": "ParameterServerStrategy",
            "Server*": "Server",
            "experimental.rpc.Client*": "experimental.rpc.Client",
            "experimental.rpc.Server*": "experimental.rpc.Server",
        }
    ),
    "experimental.rpc": dict.fromkeys(
        ("jax", "torch"), differs("What is in it is refused.")
    ),
    **_refused_of("*Strategy", Strategy),
    "experimental.Collective*": differs("It warns that it is the old name."),
    "experimental.MultiWorkerMirroredStrategy": differs("It warns that it is old."),
    "experimental.MultiWorkerMirroredStrategy.__init__": differs(
        "It warns that it is old."
    ),
    **_refused_of("ReplicaContext", ReplicaContext),
    **dict.fromkeys(
        ("HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"),
        {
            "jax": _ENGINE_DECIDES,
            "torch": _ENGINE_DECIDES,
            "tensorflow": WORKS,
        },
    ),
    "*Strategy.reduce": differs("`axis` may be left out.", "run-and-reduce"),
    "StrategyExtended": differs("It is made with the devices of its replicas."),
    "StrategyExtended.__init__": differs(
        "It is made with the devices of its replicas."
    ),
    "StrategyExtended.update": differs(
        "What would make components differ is refused.", "values-and-variables"
    ),
    "ReplicaContext": differs("`run` makes it."),
    "ReplicaContext.__init__": differs("`run` makes it."),
    "DistributedValues": differs("It is made with its values."),
    "DistributedDataset": differs("The strategy makes it."),
    "DistributedIterator": differs("The dataset makes it."),
    "DistributedIterator.get_next": differs(
        "It ends with StopIteration.", "distributed-datasets"
    ),
    "*Strategy.experimental_distribute_dataset": differs(
        "Any iterable of batches, split by rows.", "distributed-datasets"
    ),
    "*RunOptions": differs(
        "It has two more fields, `compile` and `whole`.", "run-and-reduce"
    ),
}

# The classes whose members are listed once.
BASES = {
    "experimental.MultiWorkerMirroredStrategy": "MultiWorkerMirroredStrategy",
    "experimental.ParameterServerStrategy": "ParameterServerStrategy",
    "experimental.TPUStrategy": "TPUStrategy",
    "?*Strategy": "Strategy",
    "?*AllReduce": "CrossDeviceOps",
    "ReductionToOneDevice": "CrossDeviceOps",
    "cluster_resolver.?*Resolver": "cluster_resolver.ClusterResolver",
}


def base_of(name: str) -> str | None:
    """Return the class from which a class inherits its members, or None."""
    fitting = (
        b for p, b in BASES.items() if b != name and fnmatch.fnmatchcase(name, p)
    )
    return next(fitting, None)


def is_implied(row: dict[str, str], rows: dict[str, dict[str, str]]) -> bool:
    """Return whether a member's class or that class's base says the same of it."""
    owner, _, short = row["name"].rpartition(".")
    if short == "__init__":  # the row of the class has the parameters
        return True
    inherited = rows.get(f"{base_of(owner)}.{short}")
    same = inherited is not None and inherited["parameters"] == row["parameters"]
    for backend, status in said_of(row["name"]).items():
        if said_of(owner)[backend].word == "refused":
            implied = status.word == "refused"
        else:
            implied = same and status == said_of(inherited["name"])[backend]
        if not implied:
            return False
    return True


def said_of(name: str) -> dict[str, Status]:
    """Return the support of a name, by backend."""
    fitting = [s for p, s in SAID.items() if fnmatch.fnmatchcase(name, p)]
    said = {}
    for status in (WORKS, *reversed(fitting)):
        said |= status if isinstance(status, dict) else dict.fromkeys(BACKENDS, status)
    return {backend: said[backend] for backend in BACKENDS}


def parameters(function: Any) -> list[str]:
    """Return a function's parameters as recorded, and those with defaults."""
    written = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        default = parameter.default
        if default is not parameter.empty:
            is_enum = isinstance(default, enum.Enum)
            text += "=." + default.name if is_enum else f"={default!r}"
        written.append(text)
    return written


def walk() -> list[dict[str, str]]:
    """Return the public names of the installed tf.distribute."""
    import tensorflow as tf

    return [
        dict(zip(FIELDS, row, strict=True)) for row in _of_module("", tf.distribute)
    ]


def _of_module(prefix: str, module: types.ModuleType) -> Iterator[tuple[str, str, str]]:
    for short, value in sorted(vars(module).items()):
        name = prefix + short
        if short.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            yield name, "module", ""
            yield from _of_module(f"{name}.", value)
        elif isinstance(value, type) and issubclass(value, enum.Enum):
            yield name, "enum", ""
            for member in value:
                yield f"{name}.{member.name}", "enum-member", repr(member.value)
        elif isinstance(value, type):
            yield name, "class", _written(_constructor(value))
            yield from _of_class(name, value)
        elif callable(value):
            yield name, "function", _written(value)


def _constructor(cls: type) -> Any:
    """Return the callable with a class's parameters, which a `__new__` may hide."""
    hidden = parameters(cls) == ["*args", "**kwargs"]
    return cls.__init__ if hidden else cls


def _of_class(name: str, cls: type) -> Iterator[tuple[str, str, str]]:
    for short in sorted(dir(cls)):
        value = inspect.getattr_static(cls, short)
        if short.startswith("_") and short not in SPECIAL:
            continue
        if value is getattr(object, short, None):
            continue
        if isinstance(value, staticmethod):
            yield f"{name}.{short}", "staticmethod", _written(value.__func__)
        elif callable(value):
            yield f"{name}.{short}", "method", _written(value)
        else:
            yield f"{name}.{short}", "property", ""


def _written(function: Any) -> str:
    return ", ".join(parameters(function))


def record() -> list[dict[str, str]]:
    """Return the recorded names."""
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def page(names: list[dict[str, str]]) -> str:
    """Return the page.

    Args:
        names: The record.
    """
    version, *names = names
    titles = " | ".join(BACKENDS.values())
    said = [said_of(row["name"]) for row in names]
    words = ("works", "differs", "refused")
    counts = [
        f"| {word} | "
        + " | ".join(str(sum(s[b].word == word for s in said)) for b in BACKENDS)
        + " |"
        for word in words
    ]
    head = HEAD.format(version=version["kind"], count=len(names))
    of_counts = [f"| names | {titles} |", "| --- " * (len(BACKENDS) + 1) + "|", *counts]
    parts = [head, "\n".join([*of_counts, ""])]
    columns = "| --- " * (len(BACKENDS) + 2) + "|"
    by_name = {row["name"]: row for row in names}
    listed = [row for row in names if not is_implied(row, by_name)]
    owners = itertools.groupby(listed, lambda row: row["name"].split(".")[0])
    for owner, rows in owners:
        table = [f"| Name | {titles} | Note |", columns, *map(_line, rows)]
        parts.append("\n".join([f"## {owner}", "", *table, ""]))
    return "\n".join(parts)


def _line(row: dict[str, str]) -> str:
    text = row["name"]
    if row["kind"] in ("class", "method", "staticmethod", "function"):
        text += f"({row['parameters']})"
    elif row["kind"] == "enum-member":
        text += f" = {row['parameters']}"
    statuses = said_of(row["name"])
    cells = " | ".join(status.cell for status in statuses.values())
    notes: dict[str, list[str]] = {}
    of_class = said_of(row["name"].rpartition(".")[0])
    for backend, status in statuses.items():
        if status.note and status != of_class[backend]:
            notes.setdefault(status.note, []).append(BACKENDS[backend])
    note = " ".join(
        text if len(where) == len(BACKENDS) else f"{', '.join(where)}: {text}"
        for text, where in notes.items()
    )
    base = base_of(row["name"])
    if row["kind"] == "class" and base:
        note += f" Inherits from `{base}`."
    return f"| `{text}` | {cells} | {note.strip()} |".replace("|  |", "| |")


def main() -> None:
    """Write the page, and the record if that is asked for."""
    if sys.argv[1:] == ["--names"]:
        import tensorflow as tf

        version = dict(zip(FIELDS, ("", tf.__version__, ""), strict=True))
        with RECORD.open("w", newline="") as file:
            written = csv.DictWriter(
                file,
                FIELDS,
                delimiter="\t",
                quoting=csv.QUOTE_NONE,
                lineterminator="\n",
            )
            written.writeheader()
            written.writerows([version, *walk()])
    PAGE.write_text(page(record()))


if __name__ == "__main__":
    main()
