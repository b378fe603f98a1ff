"""docs/tf_distribute.md is what tf.distribute has, and what this backend does."""

import enum
import fnmatch
import inspect
import operator
import re
import types

import keras
import pytest

import keras_strategy as ks
from tools import pages

VERSION, *NAMES = pages.read_names()
BACKEND = keras.backend.backend()
OWNERS = sorted({row["name"].split(".")[0] for row in NAMES})


def rows_of(owner):
    """The names below one of tf.distribute's, and what is said of them here."""
    listed = [row for row in NAMES if row["name"].split(".")[0] == owner]
    return [(row, pages.statuses_of(row["name"])[BACKEND]) for row in listed]


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
            if hasattr(found, "reason"):
                raise AttributeError(part)
    return found


def difference(row):
    """Return the difference between a name of tf.distribute and ours, or None."""
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
    ours = pages.describe_parameters(found)
    theirs = [p for p in expected.split(", ") if p]
    further = ours[len(theirs) :]
    if ours[: len(theirs)] == theirs and all(
        "=" in p or p.startswith("*") for p in further
    ):
        return None
    return f"takes ({', '.join(ours)}) where tf.distribute takes ({expected})"


def error_of(row):
    """Return the result of using a refused name."""
    owner, _, last = row["name"].rpartition(".")
    of_refused = owner and pages.statuses_of(owner)[BACKEND].word == "refused"
    if of_refused and row["kind"] != "staticmethod":
        return error_of(next(other for other in NAMES if other["name"] == owner))
    try:
        if owner.endswith("Strategy"):
            getattr(ks.OneDeviceStrategy("cpu:0"), last)
        else:
            found = getattr(find(owner) if owner else ks, last)
            found(*[None for p in row["parameters"].split(", ") if p])
    except (AttributeError, ks.errors.UnsupportedBackendError) as error:
        return str(error)
    return "none"


def test_page_is_current():
    assert pages.PAGES["names"].read_text() == pages.names_page(), "run `make pages`"


def test_record_matches_installed_tensorflow():
    if BACKEND != "tensorflow":
        pytest.skip("TensorFlow knows")
    import tensorflow as tf

    if VERSION["kind"] != tf.__version__:
        pytest.skip("the record is of another version of TensorFlow")
    assert pages.installed_names() == NAMES, "see `pages` in the Makefile"


@pytest.mark.parametrize("owner", OWNERS)
def test_supported_names_have_native_parameters(owner):
    wrong = {
        row["name"]: difference(row)
        for row, said in rows_of(owner)
        if said.word == "works"
    }
    assert {name: what for name, what in wrong.items() if what} == {}


def test_differing_names_exist():
    for row, said in [pair for owner in OWNERS for pair in rows_of(owner)]:
        if said.word == "differs":
            assert difference(row) != "is not there", row["name"]
            assert said.note


def test_refused_names_give_a_reason():
    """And what to use."""
    for row, said in [pair for owner in OWNERS for pair in rows_of(owner)]:
        if said.word == "refused":
            assert said.note in error_of(row), row["name"]


def test_every_name_is_listed():
    """Each works, works differently or is refused; the tests above show which."""
    words = {said.word for owner in OWNERS for _, said in rows_of(owner)}
    assert words == {"works", "differs", "refused"}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="it asks TensorFlow's classes")
def test_base_classes_are_those_of_tensorflow():
    """Without this, the page would leave out members of other classes."""
    import tensorflow as tf

    classes = {row["name"] for row in NAMES if row["kind"] == "class"}
    based = {name: base for name in classes if (base := pages.base_of(name))}
    assert len(based) == 19
    for name, base in based.items():
        alias = name == f"experimental.{base}"  # an older class of that name
        found, expected = (operator.attrgetter(n)(tf.distribute) for n in (name, base))
        assert alias or issubclass(found, expected), name


def test_unlisted_members_do_as_their_base_class():
    rows = {row["name"]: row for row in NAMES}
    assert pages.is_implied(rows["MirroredStrategy.run"], rows)
    assert pages.is_implied(rows["TPUStrategy.run"], rows)  # refused with its class
    alone = "TPUStrategy.experimental_assign_to_logical_device"
    assert not pages.is_implied(rows[alone], rows)
    assert not pages.is_implied(rows["ParameterServerStrategy.reduce"], rows)
    assert not pages.is_implied(rows["Strategy.run"], rows)


@pytest.mark.parametrize("pattern", pages.statuses_by_pattern())
def test_every_entry_is_a_native_name(pattern):
    said = [pages.statuses_by_pattern()[pattern]]
    if isinstance(said[0], dict):
        said = said[0].values()
    assert fnmatch.filter([row["name"] for row in NAMES], pattern)
    page = (pages.ROOT / "docs" / "differences.md").read_text().lower()
    for anchor in {status.anchor for status in said} - {""}:
        assert re.search(f"^### {anchor.replace('-', '.')}$", page, re.MULTILINE)
