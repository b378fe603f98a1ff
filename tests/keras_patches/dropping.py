"""Leave out one patch, in this process and in the workers that it starts."""

import contextlib
import io

import keras
import pytest

from keras_strategy.keras_patches import patch
from keras_strategy.keras_patches.installation import all_patches
from tools.pages import definition_of


def name_of(extension: patch.Patch) -> str:
    """Return a patch's unique name."""
    module = definition_of(extension).__module__.removeprefix("keras_strategy.")
    return f"{module} {extension.target}"


def drop(name: str) -> None:
    """Make the first strategy install all patches but one."""
    install = patch.install

    def all_but_one(extensions):
        listed = list(extensions)
        kept = [extension for extension in listed if name_of(extension) != name]
        assert len(kept) == len(listed) - 1, f"there is no hook {name!r}"
        install(kept)

    patch.install = all_but_one


def find_tests() -> dict[str, tuple[str, str]]:
    """Return the backend and the test that need each patch, by the patch's name.

    They are those that this process's backend has. A test has the mark
    `needs_patch(patch, backend=..., case=...)`. `case` is the id of its parameters. The
    mark names the target of a patch, with the module in front if the backend has two
    patches of the target, or if the patch is in `backends.threads`.
    """
    collector = _Collector()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(["--collect-only", "-q", "tests"], [collector])
    assert status == 0, printed.getvalue()
    tests = {item.nodeid for item in collector.items}
    names = list_names()
    found = {}
    for item in collector.items:
        for mark in item.iter_markers("needs_patch"):
            test = item.nodeid.partition("[")[0]
            if "case" in mark.kwargs:
                test += f"[{mark.kwargs['case']}]"
                assert test in tests, f"{test}: no parameters have this id"
            for target in mark.args:
                named = [n for n in names if target in (n, n.partition(" ")[2])]
                if mark.kwargs["backend"] != keras.backend.backend():
                    named = [n for n in named if target == n or n.startswith("keras_")]
                    if not named:
                        continue  # a patch that this backend lacks
                assert len(named) == 1, f"{test} needs {target!r}, which is {named}"
                entry = mark.kwargs["backend"], test
                assert found.setdefault(named[0], entry) == entry, target
    return found


def list_names() -> set[str]:
    """Return the names of this backend's patches that this version of Keras needs."""
    patches = all_patches()
    return {name_of(p) for p in patches if p.needed is None or p.needed()}


class _Collector:
    """Plugin for pytest that keeps the collected tests."""

    def pytest_collection_finish(self, session):
        self.items = session.items
