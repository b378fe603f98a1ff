"""Write the notebooks of the documentation, with their outputs: `make notebooks`.

    python tools/notebooks.py [NAME ...]

An example that has lines `# %%` is a notebook, too: each begins a cell of code, and
`# %% [markdown]` a cell of text, in comments. The docstring of the program is the first
cell. A kernel runs the cells from top to bottom. docs/notebooks/*.ipynb has what they
print and show.
"""

import json
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
SOURCES = {
    path.stem: path
    for path in sorted(ROOT.glob("examples/*.py"))
    if "\n# %%\n" in path.read_text()
}
_BEGIN = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook(source: str) -> dict:
    """Return the notebook of a program, without outputs."""
    docstring, *parts = _BEGIN.split(source)
    title, text = docstring.strip().strip('"').split("\n", 1)
    cells = [_cell("markdown", f"# {title.rstrip('.')}\n{text}")]
    for mark, text in zip(parts[::2], parts[1::2], strict=True):
        if mark:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        cells.append(_cell("markdown" if mark else "code", text))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def _cell(kind: str, text: str) -> dict:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    source = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": kind, "metadata": {}, "source": source, **code}


def run(book: dict) -> dict:
    """Return the notebook with what its cells print and show in a kernel."""
    import nbclient
    import nbformat
    from jupyter_client.manager import AsyncKernelManager

    node = nbformat.reads(json.dumps(book), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # By sockets of a folder: a port may be taken before the kernel listens there.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=os.path.join(folder, "kernel")
        )
        nbclient.NotebookClient(
            node, km=kernel, timeout=280, record_timing=False, coalesce_streams=True
        ).execute()
    for cell in node.cells:
        if cell.cell_type == "code":
            # Backends write to the standard error what depends on the machine.
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("image/jpeg", None)  # as image/png
    return json.loads(nbformat.writes(node))


def main() -> int:
    """Run the notebooks, each on the backend that it names."""
    os.environ.pop("KERAS_BACKEND", None)
    os.environ["PYTHONPATH"] = str(ROOT)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SOURCES:
        book = run(notebook(SOURCES[name].read_text()))
        path = FOLDER / f"{name}.ipynb"
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
        print(path.relative_to(ROOT), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
