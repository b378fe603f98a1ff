"""Run of a program up to its first `fit`."""

import argparse
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import keras
from keras import tree


def run_to_first_fit(
    options: argparse.Namespace, check: Callable[[dict[str, Any]], int]
) -> int:
    """Run a program, and exit with what `check` returns for the arguments of `fit`."""
    signature = inspect.signature(keras.Model.fit)

    @functools.wraps(keras.Model.fit)
    def fit(*args, **kwargs):
        sys.exit(check(signature.bind(*args, **kwargs).arguments))

    sys.argv = [options.program, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    keras.Model.fit = fit
    try:
        runpy.run_path(options.program, run_name="__main__")
    finally:
        del keras.Model.fit  # the class inherits it
    command = f"keras-strategy {options.subcommand}"
    print(f"{command}: {options.program} calls no `fit`.", file=sys.stderr)
    return 1


def first_batch(arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the data of the first step of `fit`, or more."""
    x: Any = arguments.get("x")
    y, sample_weight = arguments.get("y"), arguments.get("sample_weight")
    if isinstance(x, keras.utils.PyDataset):
        return keras.utils.unpack_x_y_sample_weight(x[0])
    if has_arrays(x):
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(next(iter(x)))


def has_arrays(x: Any) -> bool:
    """Return True if `fit` divides arrays into batches."""
    return all(hasattr(leaf, "shape") for leaf in tree.flatten(x))
