"""Subcommand `verify`: a step of the first `fit` of a program beside one device's."""

import argparse
import functools
import inspect
import os
import runpy
import sys
from typing import Any

import keras
from keras import tree

import keras_strategy as ks


def main(options: argparse.Namespace) -> int:
    """Run a program up to its first `fit`, and exit with 1 if the step differs."""
    signature = inspect.signature(keras.Model.fit)

    @functools.wraps(keras.Model.fit)
    def fit(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        report = ks.verify(arguments["self"], *_first_batch(arguments))
        print(report)
        sys.exit(int(report.differs))

    sys.argv = [options.program, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    keras.Model.fit = fit
    try:
        runpy.run_path(options.program, run_name="__main__")
    finally:
        del keras.Model.fit  # the class inherits it
    print(f"keras-strategy verify: {options.program} calls no `fit`.", file=sys.stderr)
    return 1


def _first_batch(arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the data of the first step of `fit`, or more."""
    x: Any = arguments.get("x")
    y, sample_weight = arguments.get("y"), arguments.get("sample_weight")
    if isinstance(x, keras.utils.PyDataset):
        return keras.utils.unpack_x_y_sample_weight(x[0])
    if all(hasattr(leaf, "shape") for leaf in tree.flatten(x)):  # arrays
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(next(iter(x)))
