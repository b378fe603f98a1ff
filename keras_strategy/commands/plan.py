"""Subcommand `plan`: the memory and traffic of the first `fit` of a program."""

import argparse
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
from keras import tree

from keras_strategy.commands.first_fit import first_batch, has_arrays, run_to_first_fit
from keras_strategy.strategies.plan import plan_step
from keras_strategy.training.ownership import strategy_of_model


def main(options: argparse.Namespace) -> int:
    def check(arguments: dict[str, Any]) -> int:
        model, (x, _, _) = arguments["self"], first_batch(arguments)
        if not model.built:
            strategy = strategy_of_model(model)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model(tree.map_structure(_symbolic, x))
        rows = len(tree.flatten(x)[0])
        if has_arrays(arguments["x"]):
            rows = arguments.get("batch_size") or 32
        rows, shard = options.batch_size or rows, options.shard
        shard = None if shard == "none" else shard
        limits = options.memory, options.bandwidth
        # A new thread is in no scope of a strategy.
        with ThreadPoolExecutor(1) as pool:
            sizes = None, rows, options.devices, shard
            task = pool.submit(plan_step, model, *sizes, *limits)
        print(task.result())
        return int(task.result().cheapest is None)

    return run_to_first_fit(options, check)


def _symbolic(array: Any) -> Any:
    dtype = keras.backend.standardize_dtype(array.dtype)
    return keras.KerasTensor((None, *array.shape[1:]), dtype)
