"""Write the pages that are made from the code.

    python tools/pages.py [patches] [errors] [plain_errors] [names] [record]

Without arguments it writes all of them. `patches` is docs/patches.md, the replaced
functions of Keras; `errors` is docs/errors.md, the errors and warnings that come with a
fix, and `plain_errors` is docs/errors_without_a_fix.md, the others; `names` is
docs/tf_distribute.md, the names of tf.distribute. `record` first renews the record of
these names, tf_distribute_names.tsv beside this file, from the installed TensorFlow:
a process without TensorFlow compares names and parameters with it.

mkdocs runs this file as a hook, too: the programs of the gallery unfold below their
pictures, and cells of tables break at the right places. So the file imports Keras and
keras_strategy only where it needs them.
"""

import ast
import csv
import dataclasses
import enum
import fnmatch
import functools
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "patches": DOCS / "patches.md",
    "errors": DOCS / "errors.md",
    "plain_errors": DOCS / "errors_without_a_fix.md",
    "names": DOCS / "tf_distribute.md",
}
BACKENDS = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    texts = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join(text.replace("|  |", "| |") for text in texts)


def section(title: str, content: str) -> str:
    """Return a section of a page."""
    return f"## {title}\n\n{content}\n"


def join_sections(head: str, tables: Mapping[str, str]) -> str:
    """Return a page with a section for each table, by its title."""
    return "\n".join([head, *itertools.starmap(section, tables.items())])


def first_paragraph(documentation: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(inspect.cleandoc(documentation or "").split("\n\n")[0].split())


# --- docs/patches.md

SHARDING = {
    "sharded_updates": "Where each replica updates a shard of the weights",
    "sharded_slots": "On torch and TensorFlow, where optimizer state is sharded",
}
THREADS = "On JAX and torch, where replicas are threads"

PATCHES_HEAD = """\
# Patches of Keras

Keras has no extension point for a strategy, so keras_strategy replaces functions of
Keras when the first strategy is created, never at import: {methods} methods, by {count}
*patches*, one in each row below. A row may replace several methods. Each patch calls
only the original function unless its condition holds, most often that a scope or a
replica is active. A model without a scope trains as if this package were not imported.
Patches that only matter for several replicas are installed with the first strategy that
has several: on one device a training step calls none of them.

Before any patch is installed, every function is compared with the signature for which
its patch was written. If this Keras changed one of them, no patch is installed and a
`KerasVersionError` names the function, see [Versions of Keras](versions.md).

`make pages` writes this page from the code, with Keras {version}, after it has checked
that all patches fit each of these versions, which need different numbers of them:

{versions}

`make drop-hooks` leaves out each patch in turn and runs the test that needs it; it
reports the tests that pass nevertheless.
"""


def patch_rows() -> list[dict[str, Any]]:
    """Return the patches of this process's backend."""
    from keras_strategy.keras_patches.installation import all_patches

    return [
        {
            "module": definition_of(patch).__module__,
            "target": patch.target,
            "reason": reason_of(patch),
            "condition": describe_condition(patch.condition),
            "methods": len(getattr(patch, "wrappers", "1")),
            "used": patch.needed is None or patch.needed(),
        }
        for patch in all_patches()
    ]


def definition_of(patch: Any) -> Any:
    """Return the class or function that defines a patch."""
    return getattr(patch, "function", type(patch))


def reason_of(patch: Any) -> str:
    """Return the first paragraph of the definition's docstring."""
    return first_paragraph(definition_of(patch).__doc__)


def describe_condition(condition: Any) -> str:
    """Return what a condition looks for, from its docstring.

    Raises:
        TypeError: If it is not a function of keras_strategy with its own docstring,
            but for example a method of a dict.
    """
    if condition is None:
        return "always"
    documentation = condition.__doc__ if inspect.isfunction(condition) else None
    if not documentation or not condition.__module__.startswith("keras_strategy."):
        raise TypeError(
            "The condition of a patch must be a function of keras_strategy that has a "
            f"docstring. Received: {condition!r}"
        )
    sentence = first_paragraph(documentation).rstrip(".")
    sentence = re.sub(r"[,;]? (?:or|else) None\b.*|; None\b.*", "", sentence)
    sentence = sentence.removeprefix("Return ")
    return sentence[0].lower() + sentence[1:]


def section_title(module: str) -> str:
    """Return the section of the page for the patches of a module."""
    package, name = module.split(".")[-2:]
    if package == "threads":
        return THREADS
    if package in BACKENDS:
        return f"On {BACKENDS[package]}"
    return SHARDING.get(name, "On every backend")


def patch_tables(listed: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of some patches, by the title of their section."""
    cells: dict[str, list[tuple[str, ...]]] = {}
    for row in listed:
        target = f"`{row['target'].removeprefix('keras.src.')}`"
        line = (target, row["condition"], row["reason"])
        cells.setdefault(section_title(row["module"]), []).append(line)
    columns = ("Function", "Condition", "Purpose")
    return {title: table(columns, lines) for title, lines in cells.items()}


def checked_rows(backend: str, *folders: Path) -> list[dict[str, Any]]:
    """Return the rows of a backend from another process that checks all patches.

    Args:
        backend: The Keras backend.
        *folders: Prepended to the module search path.

    Raises:
        subprocess.CalledProcessError: If a patch does not fit; see the output.
    """
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    process = subprocess.run(
        [sys.executable, __file__, "rows"],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def patches_page() -> str:
    """Check all patches on each version of Keras, and return docs/patches.md."""
    import keras
    from versions import REQUIREMENTS, install, version_in  # in the same folder

    versions = []
    for name in REQUIREMENTS:
        folder = install(name)
        version = version_in(folder)
        print(f"Keras {version}", flush=True)
        used = [
            {(row["module"], row["target"]) for row in listed if row["used"]}
            for listed in (checked_rows(backend, folder) for backend in BACKENDS)
        ]
        versions.append((version, len(set().union(*used)), *map(len, used)))
    tables: dict[str, str] = {}
    methods = {}
    for backend in BACKENDS:
        listed = checked_rows(backend)
        tables |= patch_tables(listed)
        methods |= {(row["module"], row["target"]): row["methods"] for row in listed}
    ordered = ["On every backend", *SHARDING.values(), THREADS]
    ordered += [f"On {name}" for name in BACKENDS.values()]
    head = PATCHES_HEAD.format(
        methods=sum(methods.values()),
        count=len(methods),
        version=keras.__version__,
        versions=table(("Keras", "patches", *BACKENDS.values()), versions),
    )
    return join_sections(head, {title: tables[title] for title in ordered})


# --- docs/errors.md

ERRORS_HEAD = """\
# Errors and warnings

Search this page for the first words of a message. `…` stands for a value of your
program. `make pages` writes it from the code: {count} messages that come with a cause
or a fix. [Others](errors_without_a_fix.md) say all in one sentence.
"""
PLAIN_ERRORS_HEAD = """\
# Errors and warnings of one sentence

{count} messages that say what was expected and what was received: pass what was
expected. [Others](errors.md) come with a cause or a fix. `make pages` writes this page.
"""
SECTIONS = {
    "strategies": "Strategies",
    "options": "Options",
    "data": "Data",
    "training": "Training",
    "keras_patches": "`fit`, layers, optimizers and saving",
    "core": "Replica context",
    "values": "Values",
    "devices": "Devices",
    "topology": "TPU topologies",
    "config": "Configuration",
    "backends": "Backends",
    "cluster": "Workers",
    "cluster_resolver": "Cluster resolvers",
    "coordinator": "Coordinator",
    "experimental": "Experimental",
    "tpu": "TPU",
    "commands": "Command line and launcher",
    "testing": "Tests with workers",
}
PACKAGE = ROOT / "keras_strategy"
_WARNINGS = {"warnings.warn": "Warning", "logger.warning": "log", "logger.error": "log"}
_SHORTEST = 12


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of the package.

    Attributes:
        section: The layer that reports it.
        kind: The exception class, "Warning" or "log".
        text: The text, with an ellipsis for each value.
    """

    section: str
    kind: str
    text: str

    def split(self) -> tuple[str, str]:
        """Return the first sentence, and the others without what was received."""
        first, *others = re.split(r"(?<=[.;!?]) (?=[A-Z…])|(?<=:) (?=[A-Z])", self.text)
        rest = " ".join(s for s in others if not s.startswith("Received"))
        return first, rest if re.search(r"\w", rest) else ""


def find_messages() -> list[Message]:
    """Return the messages of the package, each once, in the order of the sections."""
    found: dict[Message, None] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        layer = layer.removesuffix("_proto")
        for kind, text in read_messages(path.read_text()):
            if layer in SECTIONS and len(text) >= _SHORTEST:
                found[Message(layer, kind, text)] = None
    order = list(SECTIONS)
    return sorted(found, key=lambda message: order.index(message.section))


def read_messages(source: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each error and warning of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        kind = _WARNINGS.get(name)
        if kind is None and re.fullmatch(r"[A-Z]\w*(Error|Failed|Timeout)", name):
            kind = name
        if kind and node.args:
            text = _text(node.args[0])
            if text:
                yield kind, re.sub(r"%[sdr]", "…", text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values
        ]
        return " ".join("".join(parts).split())
    return ""


def errors_page() -> str:
    """Return docs/errors.md."""
    fixed = [message for message in find_messages() if message.split()[1]]
    columns = ("kind", "message", "cause and fix")
    return _messages_page(ERRORS_HEAD, columns, fixed)


def plain_errors_page() -> str:
    """Return docs/errors_without_a_fix.md."""
    plain = [message for message in find_messages() if not message.split()[1]]
    return _messages_page(PLAIN_ERRORS_HEAD, ("kind", "message"), plain)


def _messages_page(
    head: str, columns: Sequence[str], messages: Sequence[Message]
) -> str:
    tables = {}
    for name, title in SECTIONS.items():
        rows = [_row(message) for message in messages if message.section == name]
        if rows:
            cut = [row[: len(columns)] for row in rows]
            tables[title] = table(columns, cut)
    return join_sections(head.format(count=len(messages)), tables)


def _row(message: Message) -> tuple[str, ...]:
    escaped = (re.sub(r"([|<>*_\[\]{}])", r"\\\1", text) for text in message.split())
    return message.kind, *(text.replace("`", "") for text in escaped)


# --- docs/tf_distribute.md

RECORD = Path(__file__).with_name("tf_distribute_names.tsv")
SUITE = Path(__file__).with_name("tf_distribute_suite.tsv")
FIELDS = ("name", "kind", "parameters")
SPECIAL = ("__init__", "__enter__", "__iter__", "__next__")

NAMES_HEAD = """\
# Every name of tf.distribute

The public names of `tf.distribute` in TensorFlow {version}, {count} in all, and what
each does here, as a name of `keras_strategy`. *Works*: it is there, and takes
tf.distribute's parameters in their order. *Differs*: it works in another way, which
the note or the page [Differences](differences.md) says. *Refused*: an error gives the
reason of the note, and says what to use.

The members of a refused class are refused for the same reason. A member that does
the same as in the base class is listed there alone; the note names the base.

[Evidence](#evidence) counts TensorFlow's own tests. `make pages` writes this page. The
tests compare it with the installed TensorFlow, and what it says of a backend with what
that does.

{counts}
"""


EVIDENCE = """\
TensorFlow {version}'s own tests of these files of `tensorflow/python/distribute`, run
on {date} with `keras_strategy` in place of `tf.distribute` on three logical CPUs:
{methods} methods.

- *pass*: with every strategy of one process that the test names.
- *fails*: none of the reasons below.
- *differs*: as [Differences](differences.md#from-tfdistribute) says, or [the list for
  cluster resolvers](how_your_cluster_is_found.md#where-this-differs-from-tfdistribute).
- *private*: it uses names of TensorFlow that are not public. A test counts if a public
  name could stand for them, as `run` does for `call_for_each_replica`.
- *not run*: it needs TensorFlow 1, GPUs, TPUs, several processes or other packages, or
  native `tf.distribute` fails here, too.

{counts}
"""


def evidence() -> str:
    """Return the section about TensorFlow's tests, from the record of a run."""
    with SUITE.open() as file:
        (version, date, *_), columns, *rows = csv.reader(file, delimiter="\t")
    totals = [sum(map(int, column)) for column in list(zip(*rows, strict=True))[1:]]
    return EVIDENCE.format(
        version=version,
        date=date,
        methods=totals[0],
        counts=table(columns, [*rows, ("all", *totals)]),
    )


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
    from keras_strategy.core.registry import UnsupportedName

    return {
        f"{pattern}.{name}": refused(value.reason)
        for name, value in vars(cls).items()
        if isinstance(value, UnsupportedName)
    }


def _of_tensorflow(pattern: str) -> dict[str, dict[str, Status]]:
    """Return a note that the names are TensorFlow's there, and refused elsewhere."""
    from keras_strategy.errors import TENSORFLOW_ONLY

    name = pattern.removesuffix("*")
    reason = TENSORFLOW_ONLY.get(name) or TENSORFLOW_ONLY[name.rpartition(".")[2]]
    elsewhere = refused(reason)
    return {pattern: {"jax": elsewhere, "torch": elsewhere, "tensorflow": WORKS}}


def _of_class(name: str, note: str) -> dict[str, Status]:
    """Return a note that the class and its constructor work in another way."""
    return dict.fromkeys((name, f"{name}.__init__"), differs(note))


# A backend that is left out has the status of the next pattern.
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


@functools.cache
def statuses_by_pattern() -> dict[str, Status | dict[str, Status]]:
    """Return the status on all backends, or on some, of names that do not just work.

    The first pattern that fits a name counts.
    """
    from keras_strategy.core.context import ReplicaContext
    from keras_strategy.strategies.base import Strategy

    does_nothing = differs("It does nothing: there, TPUs need it.")
    engine_decides = differs(
        "The engine decides how values travel; a line in the log says so.",
        "other-names",
    )
    of_coordinator = {
        "": "Its workers are Dask's, or those that it starts.",
        ".__init__": "Its workers are Dask's, or those that it starts.",
        ".schedule": "What a function is to assign, it returns.",
        ".create_per_worker_dataset": "A worker makes it when it first needs it.",
    }
    not_tensorflow = ("jax", "torch")
    return {
        "TPUStrategy*": _NOT_ON_JAX,
        "experimental.TPUStrategy*": _NOT_ON_JAX,
        **_of_class("experimental.TPUStrategy", "It warns that it is old."),
        "TPUStrategy.experimental_assign_to_logical_device": differs(
            "It checks the number: XLA decides what computes where.", "other-names"
        ),
        "experimental.PreemptionCheckpointHandler": differs(
            "A `ks.CheckpointManager` is saved on every backend.", "other-names"
        ),
        "experimental.PreemptionCheckpointHandler.watch_preemption_scope": does_nothing,
        "experimental.PreemptionWatcher": differs("It watches this process's SIGTERM."),
        "experimental.PreemptionWatcher.block_until_worker_exit": does_nothing,
        **{
            f"{package}coordinator.ClusterCoordinator{member}": dict.fromkeys(
                not_tensorflow, differs(note, "other-names")
            )
            for package in ("", "experimental.")
            for member, note in of_coordinator.items()
        },
        **_of_tensorflow("ParameterServerStrategy*"),
        **_of_tensorflow("experimental.ParameterServerStrategy*"),
        **_of_tensorflow("Server*"),
        **_of_tensorflow("experimental.rpc.Client*"),
        **_of_tensorflow("experimental.rpc.Server*"),
        "experimental.rpc": dict.fromkeys(
            not_tensorflow, differs("What is in it is refused.")
        ),
        **_refused_of("*Strategy", Strategy),
        "experimental.Collective*": differs("It warns that it is the old name."),
        **_of_class(
            "experimental.MultiWorkerMirroredStrategy", "It warns that it is old."
        ),
        **_refused_of("ReplicaContext", ReplicaContext),
        **dict.fromkeys(
            ("HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"),
            dict.fromkeys(not_tensorflow, engine_decides),
        ),
        "*Strategy.reduce": differs("`axis` may be left out.", "run-and-reduce"),
        **_of_class("StrategyExtended", "It is made with the devices of its replicas."),
        "StrategyExtended.update": differs(
            "What would make components differ is refused.", "values-and-variables"
        ),
        **_of_class("ReplicaContext", "`run` makes it."),
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
    """Return True if a member's class or that class's base says the same of it."""
    owner, _, short = row["name"].rpartition(".")
    if short == "__init__":  # the row of the class has the parameters
        return True
    inherited = rows.get(f"{base_of(owner)}.{short}")
    same = inherited is not None and inherited["parameters"] == row["parameters"]
    for backend, status in statuses_of(row["name"]).items():
        if statuses_of(owner)[backend].word == "refused":
            implied = status.word == "refused"
        else:
            implied = same and status == statuses_of(inherited["name"])[backend]
        if not implied:
            return False
    return True


@functools.cache
def statuses_of(name: str) -> dict[str, Status]:
    """Return the support of a name, by backend."""
    statuses = dict.fromkeys(BACKENDS, WORKS)
    for pattern, status in reversed(statuses_by_pattern().items()):
        if fnmatch.fnmatchcase(name, pattern):
            is_one = isinstance(status, Status)
            statuses |= dict.fromkeys(BACKENDS, status) if is_one else status
    return statuses


def describe_parameters(function: Any) -> list[str]:
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


def installed_names() -> list[dict[str, str]]:
    """Return the public names of the installed tf.distribute."""
    import tensorflow as tf

    rows = _names("", tf.distribute)
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def _names(prefix: str, module: types.ModuleType) -> Iterator[tuple[str, str, str]]:
    for short, value in sorted(vars(module).items()):
        name = prefix + short
        if short.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            yield name, "module", ""
            yield from _names(f"{name}.", value)
        elif isinstance(value, type) and issubclass(value, enum.Enum):
            yield name, "enum", ""
            for member in value:
                yield f"{name}.{member.name}", "enum-member", repr(member.value)
        elif isinstance(value, type):
            yield name, "class", _join_parameters(_constructor(value))
            yield from _members(name, value)
        elif callable(value):
            yield name, "function", _join_parameters(value)


def _constructor(cls: type) -> Any:
    """Return the callable with a class's parameters, which a `__new__` may hide."""
    hidden = describe_parameters(cls) == ["*args", "**kwargs"]
    return cls.__init__ if hidden else cls


def _members(name: str, cls: type) -> Iterator[tuple[str, str, str]]:
    for short in sorted(dir(cls)):
        value = inspect.getattr_static(cls, short)
        if short.startswith("_") and short not in SPECIAL:
            continue
        if value is getattr(object, short, None):
            continue
        if isinstance(value, staticmethod):
            yield f"{name}.{short}", "staticmethod", _join_parameters(value.__func__)
        elif callable(value):
            yield f"{name}.{short}", "method", _join_parameters(value)
        else:
            yield f"{name}.{short}", "property", ""


def _join_parameters(function: Any) -> str:
    return ", ".join(describe_parameters(function))


def read_names() -> list[dict[str, str]]:
    """Return the recorded names, after a row with TensorFlow's version."""
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def record_names() -> None:
    """Record the names of the installed TensorFlow."""
    import tensorflow as tf

    version = dict(zip(FIELDS, ("", tf.__version__, ""), strict=True))
    with RECORD.open("w", newline="") as file:
        options = {"quoting": csv.QUOTE_NONE, "lineterminator": "\n"}
        written = csv.DictWriter(file, FIELDS, delimiter="\t", **options)
        written.writeheader()
        written.writerows([version, *installed_names()])


def names_page() -> str:
    """Return docs/tf_distribute.md, from the record."""
    version, *names = read_names()
    statuses = [statuses_of(row["name"]) for row in names]
    counts = [
        (word, *(sum(s[b].word == word for s in statuses) for b in BACKENDS))
        for word in ("works", "differs", "refused")
    ]
    titles = BACKENDS.values()
    head = NAMES_HEAD.format(
        version=version["kind"],
        count=len(names),
        counts=table(("names", *titles), counts),
    )
    by_name = {row["name"]: row for row in names}
    listed = [row for row in names if not is_implied(row, by_name)]
    owners = itertools.groupby(listed, lambda row: row["name"].split(".")[0])
    columns = ("Name", *titles, "Note")
    tables = {owner: table(columns, map(_cells, rows)) for owner, rows in owners}
    return join_sections(head, {"Evidence": evidence().rstrip(), **tables})


def _cells(row: dict[str, str]) -> tuple[str, ...]:
    text = row["name"]
    if row["kind"] in ("class", "method", "staticmethod", "function"):
        text += f"({row['parameters']})"
    elif row["kind"] == "enum-member":
        text += f" = {row['parameters']}"
    statuses = statuses_of(row["name"])
    notes: dict[str, list[str]] = {}
    of_owner = statuses_of(row["name"].rpartition(".")[0])
    for backend, status in statuses.items():
        if status.note and status != of_owner[backend]:
            notes.setdefault(status.note, []).append(BACKENDS[backend])
    note = " ".join(
        text if len(where) == len(BACKENDS) else f"{', '.join(where)}: {text}"
        for text, where in notes.items()
    )
    base = base_of(row["name"])
    if row["kind"] == "class" and base:
        note += f" Inherits from `{base}`."
    cells = (status.cell for status in statuses.values())
    return f"`{text}`", *cells, note.strip()


# --- the hook of mkdocs

_PROGRAM = re.compile(r"^`(examples/\w+\.py)`(?:, and \[as(.*))?$", re.MULTILINE)
_ENTRY = re.compile(r"^::: keras_strategy\.(.+)$", re.MULTILINE)
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
# Browsers break a line behind the hyphen of 1e-07, and before the % of 100 %.
_NUMBER = re.compile(r"(?<![\w.-])\d(?:\.\d+)?e-\d\d\b|\d %")
_LONG = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
_PART = re.compile(r"[_./:(]+(?=\w)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Insert the programs of the gallery, folded, and the names of the reference."""
    if page.file.src_uri == "api.md":
        return markdown.replace("<!-- summary -->", summary_of_names(markdown))
    if page.file.src_uri != "gallery.md":
        return markdown

    def folded(found: re.Match) -> str:
        code = textwrap.indent((ROOT / found[1]).read_text(), "    ")
        notebook = f"[As{found[2]}" if found[2] else ""
        block = f"    ```python\n{code}    ```"
        return f'??? example "{found[1]}"\n\n{block}\n\n{notebook}'

    return _PROGRAM.sub(folded, markdown)


def summary_of_names(markdown: str) -> str:
    """Return a table of the names of the reference, by its sections."""
    import griffe  # a dependency of mkdocstrings

    package = griffe.load("keras_strategy", search_paths=[ROOT])
    rows = []
    for section in markdown.split("\n## ")[1:]:
        title, text = section.split("\n", 1)
        names = _ENTRY.findall(text)
        listed = "" if names else first_paragraph(text)
        rows.append((f"**[{title}](#{title.lower().replace(' ', '-')})**", listed))
        for name in names:
            documentation = package[name].docstring
            purpose = first_paragraph(documentation and documentation.value)
            rows.append((f"[`{name}`](#keras_strategy.{name})", purpose))
    return table(("name", "purpose"), rows)


def on_page_content(html: str, **_) -> str:
    """Mark where lines of tables may be broken."""

    def parted(code: re.Match) -> str:
        return _PART.sub(r"\g<0><wbr>", code[0])

    def cell(found: re.Match) -> str:
        kept = _NUMBER.sub(r'<span class="number">\g<0></span>', found[0])
        return _LONG.sub(parted, kept)

    return _CELL.sub(cell, html)


# --- the command

WRITERS: dict[str, Callable[[], str]] = {
    "patches": patches_page,
    "errors": errors_page,
    "plain_errors": plain_errors_page,
    "names": names_page,
}


def main(names: Sequence[str]) -> None:
    """Write some pages, or all."""
    for name in names or PAGES:
        if name == "record":
            record_names()
        else:
            PAGES[name].write_text(WRITERS[name]())


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:  # see `checked_rows`
        from keras_strategy.keras_patches.installation import all_patches
        from keras_strategy.keras_patches.patch import select_and_check

        select_and_check(all_patches())
        print(json.dumps(patch_rows()))
    else:
        main(sys.argv[1:])
