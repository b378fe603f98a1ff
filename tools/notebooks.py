"""Notebooks of the examples, made when the documentation is built (a hook of mkdocs).

A cell for what stands above the imports, one for them, and one for each function; the
last one calls `main`, with the arguments that a program would get.
"""

import ast
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def notebook(source: str) -> dict:
    """Return the notebook of a program.

    Args:
        source: The text of an example: a docstring, imports, constants, functions, and
            a call of `main` where it is not imported.
    """
    lines = source.splitlines()
    body = ast.parse(source).body
    cells = [_cell("markdown", ast.get_docstring(ast.parse(source)) or "")]
    begin = body[0].end_lineno or 0
    several: list[str] = []
    for node in body[1:]:
        text = lines[begin : node.end_lineno]
        begin = node.end_lineno or begin
        alone = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)
        if alone and several:
            cells.append(_cell("code", "\n".join(several)))
            several = []
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            called = "main(sys.argv[1:])" if "main(sys.argv" in source else "main()"
            lists = 'sys.argv[1:] = []  # or ["--epochs", "3"]'
            text = [lists, f"assert {called} == 0"]
        several += text
        if alone:
            cells.append(_cell("code", "\n".join(several)))
            several = []
    if several:
        cells.append(_cell("code", "\n".join(several)))
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


def on_files(files, config):
    """Add the notebooks to the pages, so that their links are checked."""
    from mkdocs.structure.files import File

    for path in sorted(ROOT.glob("examples/*.py")):
        if "MultiWorkerMirroredStrategy" in path.read_text():
            continue  # a notebook is none of several workers
        text = json.dumps(notebook(path.read_text()), indent=1)
        name = f"notebooks/{path.stem}.ipynb"
        files.append(File.generated(config, name, content=text))
    return files
