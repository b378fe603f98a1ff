"""Subcommand `verify`: an audit of the first `fit` of a program."""

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
    signature = inspect.signature(keras.Model.fit)

    @functools.wraps(keras.Model.fit)
    def fit(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        batch = _first_batch(*map(given.get, ("x", "y", "sample_weight")))
        report = ks.verify(given["self"], *batch)
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


def _first_batch(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return the data of the first step of `fit`, or more."""
    if isinstance(x, keras.utils.PyDataset):
        return keras.utils.unpack_x_y_sample_weight(x[0])
    if all(hasattr(leaf, "shape") for leaf in tree.flatten(x)):
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(next(iter(x)))
