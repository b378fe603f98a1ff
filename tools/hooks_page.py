"""Write docs/hooks.md, the list of all patches of Keras.

    python tools/hooks_page.py

A process has one Keras backend, so each backend gets its own process. All patches are
also checked against the other supported versions of Keras: a patch that does not fit
would make that version unusable, so the page is not written then.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hooks.md"
BACKENDS = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}
SHARDING = {
    "patches_sharded_update": "Where each replica updates a shard of the weights",
    "patches_sharding": "On torch and TensorFlow, where optimizer state is sharded",
}
THREADS = "On JAX and torch, where replicas are threads"

HEAD = """\
# Patches of Keras

Keras has no extension point for a strategy, so keras_strategy replaces functions of
Keras: {count} in all, when the first strategy is created, never at import. Each *patch*
calls only the original function unless its condition holds, most often that a scope or
a replica is active. A model without a scope trains as if this package were not
imported. Patches that only matter for several replicas are installed with the first
strategy that has several: on one device a training step calls none of them.

Before any patch is installed, every function is compared with the signature for which
its patch was written. If this Keras changed one of them, no patch is installed and a
`KerasVersionError` names the function, see [Versions of Keras](keras_versions.md).

`make hooks` writes this page from the code, with Keras {version}, after it has checked
that all patches fit each of these versions, which need different numbers of them:

{versions}

`make drop-hooks` leaves out each patch in turn and runs the test that needs it; it
reports the tests that pass nevertheless.
"""


def rows() -> list[dict[str, Any]]:
    """Return the patches of this process's backend."""
    from keras_strategy.keras_patches.installation import all_patches

    return [
        {
            "module": definition_of(patch).__module__,
            "target": patch.target,
            "reason": reason_of(patch),
            "condition": describe_condition(patch.condition),
            "used": patch.needed is None or patch.needed(),
        }
        for patch in all_patches()
    ]


def definition_of(patch: Any) -> Any:
    """Return the class or function that defines a patch."""
    return getattr(patch, "function", type(patch))


def reason_of(patch: Any) -> str:
    """Return the first paragraph of the definition's docstring."""
    documentation = inspect.cleandoc(definition_of(patch).__doc__ or "")
    return " ".join(documentation.split("\n\n")[0].split())


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
    sentence = " ".join(documentation.split("\n\n")[0].split()).rstrip(".")
    sentence = re.sub(r"[,;]? (?:or|else) None\b.*|; None\b.*", "", sentence)
    sentence = sentence.removeprefix("Return ")
    return sentence[0].lower() + sentence[1:]


def section_title(module: str) -> str:
    """Return the section of the page for the patches of a module."""
    package, name = module.split(".")[-2:]
    if package == "threads":
        return SHARDING.get(name, THREADS)
    return f"On {BACKENDS[package]}" if package in BACKENDS else "On every backend"


def section(title: str, listed: Sequence[dict[str, Any]]) -> str:
    """Return a section of the page."""
    lines = [
        f"## {title}",
        "",
        "| Function | Condition | Purpose |",
        "| --- | --- | --- |",
    ]
    for row in listed:
        target = row["target"].removeprefix("keras.src.")
        lines.append(f"| `{target}` | {row['condition']} | {row['reason']} |")
    return "\n".join(lines) + "\n"


def sections(listed: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the sections for some patches, by title."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in listed:
        grouped.setdefault(section_title(row["module"]), []).append(row)
    return {title: section(title, rows) for title, rows in grouped.items()}


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
        [sys.executable, __file__, "--rows"],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Check each version of Keras on each backend, and write the page."""
    import keras
    import keras_versions  # in the same folder

    versions = [
        "| Keras | patches | " + " | ".join(BACKENDS.values()) + " |",
        "| --- | --- |" + " --- |" * len(BACKENDS),
    ]
    for name in keras_versions.REQUIREMENTS:
        folder = keras_versions.install(name)
        version = keras_versions.version_in(folder)
        print(f"Keras {version}", flush=True)
        used = [
            {(row["module"], row["target"]) for row in listed if row["used"]}
            for listed in (checked_rows(backend, folder) for backend in BACKENDS)
        ]
        counts = [len(set().union(*used)), *map(len, used)]
        versions.append(f"| {version} | " + " | ".join(map(str, counts)) + " |")
    found: dict[str, str] = {}
    count = set()
    for backend in BACKENDS:
        listed = checked_rows(backend)
        found |= sections(listed)
        count |= {(row["module"], row["target"]) for row in listed}
    ordered = ["On every backend", *SHARDING.values(), THREADS]
    ordered += [f"On {name}" for name in BACKENDS.values()]
    head = HEAD.format(
        count=len(count),
        version=keras.__version__,
        versions="\n".join(versions),
    )
    PAGE.write_text("\n".join([head, *(found[title] for title in ordered)]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--rows"]:
        from keras_strategy.keras_patches.installation import all_patches
        from keras_strategy.keras_patches.patch import select_and_check

        select_and_check(all_patches())
        print(json.dumps(rows()))
    else:
        main()
