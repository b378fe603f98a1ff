"""Subcommands `verify` and `plan`: a check of the first `fit` of a program."""

import argparse
import contextlib
import functools
import inspect
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
from keras import tree

import keras_strategy as ks
from keras_strategy.strategies.plan import plan_step
from keras_strategy.training.ownership import strategy_of_model


def main(options: argparse.Namespace) -> int:
    """Run a program, and exit with the status of the check of its first `fit`."""
    check = _verify if options.subcommand == "verify" else _plan
    signature = inspect.signature(keras.Model.fit)

    @functools.wraps(keras.Model.fit)
    def fit(*args, **kwargs):
        sys.exit(check(options, signature.bind(*args, **kwargs).arguments))

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


def _verify(options: argparse.Namespace, arguments: dict[str, Any]) -> int:
    report = ks.verify(arguments["self"], *_first_batch(arguments))
    print(report)
    return int(report.differs)


def _plan(options: argparse.Namespace, arguments: dict[str, Any]) -> int:
    model, (x, _, _) = arguments["self"], _first_batch(arguments)
    if not model.built:
        strategy = strategy_of_model(model)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model(tree.map_structure(_symbolic, x))
    rows = len(tree.flatten(x)[0])
    if _has_arrays(arguments["x"]):
        rows = arguments.get("batch_size") or 32
    shard = None if options.shard == "none" else options.shard
    sizes = None, options.batch_size or rows, options.devices, shard
    # A new thread is in no scope of a strategy.
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(plan_step, model, *sizes, options.memory)
    print(task.result())
    return int(task.result().cheapest is None)


def _symbolic(array: Any) -> Any:
    dtype = keras.backend.standardize_dtype(array.dtype)
    return keras.KerasTensor((None, *array.shape[1:]), dtype)


def _first_batch(arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the data of the first step of `fit`, or more."""
    x: Any = arguments.get("x")
    y, sample_weight = arguments.get("y"), arguments.get("sample_weight")
    if isinstance(x, keras.utils.PyDataset):
        return keras.utils.unpack_x_y_sample_weight(x[0])
    if _has_arrays(x):
        return x, y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(next(iter(x)))


def _has_arrays(x: Any) -> bool:
    """Return True if `fit` divides arrays into batches."""
    return all(hasattr(leaf, "shape") for leaf in tree.flatten(x))
