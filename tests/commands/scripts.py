"""Running small scripts in workers of the command line, without Keras."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# What every script starts with.
HEAD = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
folder = pathlib.Path(__file__).parent

def tell(name, text):
    part = folder / f"{name}{rank}.part"
    part.write_text(str(text))
    part.rename(folder / f"{name}{rank}")
"""


class Script:
    """A script in a folder of its own, and what `keras-strategy run` makes of it."""

    def __init__(self, folder: pathlib.Path, text: str, head: str = HEAD) -> None:
        self.folder = folder
        self.path = folder / "script.py"
        self.path.write_text(head + text)

    def start(self, *options: str, arguments=(), **keywords) -> subprocess.Popen:
        command = ["run", *options, str(self.path), *arguments]
        return start(*command, **keywords)

    def run(self, *options: str, arguments=()) -> subprocess.CompletedProcess:
        return finish(self.start(*options, arguments=arguments))

    def told(self, name: str, workers: int) -> list:
        """Return the values that workers reported under a name, by rank."""
        return [
            json.loads((self.folder / f"{name}{rank}").read_text())
            for rank in range(workers)
        ]


def start(
    *arguments: str, program=("-m", "keras_strategy"), **keywords
) -> subprocess.Popen:
    keywords = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        **keywords,
    )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
