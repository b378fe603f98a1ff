"""Every public name of tf.distribute: here with the same parameters, or excused.

tf_distribute_names.tsv, beside this file, lists the names, kinds and parameters of
tf.distribute in TensorFlow 2.21. A parameter list begins like tf.distribute's; further
parameters must have defaults.
"""

import csv
import enum
import fnmatch
import inspect
import pathlib
import types

import pytest

import keras_strategy as ks

SESSIONS = "It is for TensorFlow 1's sessions."
ITERATORS = "It is for TensorFlow 1's iterators."
DEPRECATED = "tf.distribute deprecates it; `extended` has it."
ENGINE = "The engine reduces: these classes are choices, and reduce nothing themselves."
SERVERS = "It is for servers that TensorFlow's coordinators send work to."
COORDINATOR = "Parameter servers are not done yet."
TPU = "TPUStrategy is not done yet."
PREEMPTION = "Preemption is not done yet."

EXCUSED = {
    "*Strategy.configure": SESSIONS,
    "*Strategy.update_config_proto": SESSIONS,
    "*Strategy.make_dataset_iterator": ITERATORS,
    "*Strategy.make_input_fn_iterator": ITERATORS,
    "*Strategy.experimental_run": ITERATORS,
    "*Strategy.unwrap": "The old name of experimental_local_results.",
    "*Strategy.group": "It joins operations of a graph into one.",
    "*Strategy.colocate_vars_with": DEPRECATED,
    "*Strategy.reduce": "`axis` has a default here, so that both spellings work.",
    "StrategyExtended": "Ours is made with the devices of its replicas.",
    "StrategyExtended.__init__": "The same.",
    "ReplicaContext": "`run` makes it; ours is made with the engine's replica.",
    "ReplicaContext.__init__": "The same.",
    "ReplicaContext.__enter__": "`run` enters it.",
    "DistributedValues": "Ours is made with its values.",
    "DistributedDataset": "The strategy makes it, with what it reads.",
    "DistributedIterator": "The dataset makes it, with what it reads.",
    **{
        f"{owner}.{method}": ENGINE
        for owner in (
            "CrossDeviceOps",
            "HierarchicalCopyAllReduce",
            "NcclAllReduce",
            "ReductionToOneDevice",
        )
        for method in ("*reduce", "*reduce_implementation", "broadcast*")
    },
    "experimental.Collective*": "The old names of CommunicationOptions and its kin.",
    "experimental.CommunicationOptions": "There, only its __init__ has parameters.",
    "experimental.MultiWorkerMirroredStrategy": (
        "There it is the old one, which takes `communication` first."
    ),
    "Server": SERVERS,
    "experimental.rpc": SERVERS,
    "ParameterServerStrategy": COORDINATOR,
    "experimental.ParameterServerStrategy": COORDINATOR,
    "experimental.CentralStorageStrategy": COORDINATOR,
    "coordinator": COORDINATOR,
    "experimental.coordinator": COORDINATOR,
    "experimental.partitioners": COORDINATOR,
    "cluster_resolver.TPUClusterResolver.set_tpu_topology": TPU,
    "cluster_resolver.TPUClusterResolver.tpu_hardware_feature": TPU,
    "TPUStrategy": TPU,
    "experimental.TPUStrategy": TPU,
    "experimental.Preemption*": PREEMPTION,
    "experimental.TerminationConfig": PREEMPTION,
}


def rows():
    path = pathlib.Path(__file__).with_name("tf_distribute_names.tsv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


ROWS = rows()


def find(name):
    """The object that a name stands for here, without calling properties."""
    found = ks
    for part in name.split("."):
        if isinstance(found, types.ModuleType):
            # What is not public does not count.
            if found is not ks and part not in found.__all__:
                raise AttributeError(part)
            found = getattr(found, part)
        else:
            found = inspect.getattr_static(found, part)
    return found


def parameters(function):
    """A function's parameters as the table writes them, and which have defaults."""
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


def difference(row):
    """What differs between a name of tf.distribute and ours, or None."""
    try:
        found = find(row["name"])
    except AttributeError:
        return "is not there"
    kind, expected = row["kind"], row["parameters"]
    if kind == "module":
        return None if isinstance(found, types.ModuleType) else "is no module"
    if kind == "enum-member":
        same = isinstance(found, enum.Enum) and repr(found.value) == expected
        return None if same else f"is {found!r}"
    if kind == "enum":
        return None if issubclass(found, enum.Enum) else "is no enum"
    if kind == "property":
        is_one = isinstance(found, property) or hasattr(found, "__get__")
        return None if is_one and not callable(found) else "is no property"
    if kind == "staticmethod":
        if not isinstance(found, staticmethod):
            return "is no static method"
        found = found.__func__
    if not callable(found):
        return "cannot be called"
    ours, theirs = parameters(found), [p for p in expected.split(", ") if p]
    further = ours[len(theirs) :]
    if ours[: len(theirs)] == theirs and all(
        "=" in p or p.startswith("*") for p in further
    ):
        return None
    return f"takes ({', '.join(ours)}) where tf.distribute takes ({expected})"


def excuses(name):
    return [p for p in EXCUSED if fnmatch.fnmatchcase(name, p)]


@pytest.mark.parametrize("owner", sorted({row["name"].split(".")[0] for row in ROWS}))
def test_names_and_parameters(owner):
    wrong = {
        row["name"]: difference(row)
        for row in ROWS
        if row["name"].split(".")[0] == owner and not excuses(row["name"])
    }
    assert {name: what for name, what in wrong.items() if what} == {}


@pytest.mark.parametrize("pattern", EXCUSED)
def test_every_excuse_is_needed(pattern):
    """Once a name is as in tf.distribute, its excuse must go."""
    excused = [row for row in ROWS if fnmatch.fnmatchcase(row["name"], pattern)]
    assert excused, f"{pattern!r} excuses nothing"
    needless = [row["name"] for row in excused if not difference(row)]
    assert needless == [], f"excused by {pattern!r} for no reason"
