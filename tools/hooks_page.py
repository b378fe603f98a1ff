"""Write docs/hooks.md, which lists all that is extended in Keras.

    python tools/hooks_page.py

A process has one Keras backend, so there is one process for each. All hooks are tried
on the other versions of Keras that are supported, too: one that does not fit would make
that version useless, and the page is not written.
"""

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
SHARES = {
    "hooks_shares": "Where each replica updates a share of the weights",
    "hooks_divisions": "On torch and TensorFlow, where an optimizer's state is shared",
}
THREADS = "On JAX and torch, where replicas are threads"

HEAD = """\
# What is extended in Keras

Keras has no place to plug a strategy in. So functions of Keras are replaced when the
first strategy is made, never at import: by the *hooks* below, {count} in all. Each of
them calls the original and nothing else unless it finds what it acts for, most often a
scope or a replica; a model of no scope is trained as if this package were not there.
What has something to do with several replicas alone is put in place when the first
strategy of several is made: on one device a step of training calls none of it.

Before any is installed, every function is compared with the one that the hook was
written for. If this Keras changed one of them, none is installed and a
`KerasVersionError` names it, see [Versions of Keras](keras_versions.md).

`make hooks` writes this page from the code, with Keras {version}, after it found that
all of it fits {others}, too.
`make drop-hooks` leaves out each hook in turn and runs the test that is to show what it
is for, and says which of them do not fail then.
"""


def rows() -> list[dict[str, Any]]:
    """What the hooks of this process's backend say of themselves."""
    from keras_strategy.keras_patches.installation import all_patches

    return [
        {
            "room": extension.room,
            "target": extension.target,
            "why": extension.why,
            "when": _condition(extension.when),
        }
        for extension in all_patches()
    ]


def _condition(when: Any) -> str:
    if when is None:
        return "is called"
    sentence = " ".join(when.__doc__.split("\n\n")[0].split()).rstrip(".")
    sentence = re.split(r",? (?:or )?None\b", sentence)[0]
    return "finds " + sentence[0].lower() + sentence[1:]


def title_of(room: str) -> str:
    """The section of the page that a module's hooks are in."""
    folder, module = room.split(".")[-2:]
    if module in SHARES:
        return SHARES[module]
    if folder == "threads":
        return THREADS
    return f"On {BACKENDS[folder]}" if folder in BACKENDS else "On every backend"


def section(title: str, listed: Sequence[dict[str, Any]]) -> str:
    """A section of the page."""
    lines = [
        f"## {title}",
        "",
        "| Function | Acts where it | Why |",
        "| --- | --- | --- |",
    ]
    for row in listed:
        target = row["target"].removeprefix("keras.src.")
        lines.append(f"| `{target}` | {row['when']} | {row['why']} |")
    return "\n".join(lines) + "\n"


def sections(listed: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The sections of some hooks, by their titles."""
    titles = dict.fromkeys(title_of(row["room"]) for row in listed)
    return {
        title: section(title, [row for row in listed if title_of(row["room"]) == title])
        for title in titles
    }


def asked(backend: str, *folders: Path) -> list[dict[str, Any]]:
    """The rows of a process of its own, in which all hooks were found to fit.

    Args:
        backend: Its Keras backend.
        *folders: Where it looks for modules first.

    Raises:
        subprocess.CalledProcessError: If one does not fit; the process printed which.
    """
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    told = subprocess.run(
        [sys.executable, __file__, "--rows"],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(told.stdout.splitlines()[-1])


def main() -> None:
    """Ask processes of each backend and of each Keras, and write the page."""
    import keras
    import keras_versions  # a neighbour of the script

    others = []
    for name in keras_versions.REQUIREMENTS:
        folder = keras_versions.install(name)
        version = keras_versions.version_in(folder)
        if version == keras.__version__:
            continue
        print(f"Keras {version}", flush=True)
        for backend in BACKENDS:
            asked(backend, folder)
        others.append(version)
    found: dict[str, str] = {}
    count = set()
    for backend in BACKENDS:
        listed = asked(backend)
        found |= sections(listed)
        count |= {(row["room"], row["target"]) for row in listed}
    ordered = ["On every backend", *SHARES.values(), THREADS]
    ordered += [f"On {name}" for name in BACKENDS.values()]
    head = HEAD.format(
        count=len(count),
        version=keras.__version__,
        others=", ".join(others[:-1]) + f" and {others[-1]}",
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
