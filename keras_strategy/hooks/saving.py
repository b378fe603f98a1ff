"""Where Keras saves: the chief alone writes for all workers."""

import os
import pathlib
import tempfile
from typing import Any

import keras

from keras_strategy.hooks import drift
from keras_strategy.hooks.conditions import of_workers
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.hooks.variables import variables_of
from keras_strategy.rules import first_values
from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.rules.aside import ArraySpill
from keras_strategy.rules.held_values import variable_value_overrides
from keras_strategy.rules.one_writer import run_on_chief, atomic_write_path, temporary_folder
from keras_strategy.rules.sharding import is_sharded

saving_lib = home_of("get_temp_dir get_attr_skipset", "keras.src.saving.saving_lib")
# What Keras leaves out where it saves objects of a kind.
_left_out: dict[str, set[str]] = {}


@hook(keras.Model, ("save", "save_weights", "export"), ("filepath",), when=of_workers)
def _save(original, strategy, self, filepath, *args, **kwargs):
    """The chief writes for all workers; what only all can read, they read before."""
    if "Optimizer" not in _left_out:
        _left_out["Optimizer"] = saving_lib.get_attr_skipset("Optimizer")
    first_values.broadcast_pending_values()  # which the chief could not do alone
    path = os.fspath(filepath)
    operation = f"`{original.__name__}` to {os.path.basename(path)}"
    drift.require_same_values(strategy, self, operation=operation)
    cluster = strategy.extended.cluster
    with _aside(path) if cluster.is_chief else ArraySpill(None) as aside:
        known = _read_by_all(self, aside, cluster.is_chief)

        def write() -> Any:
            aside.check()
            with atomic_write_path(path) as temporary, variable_value_overrides(known):
                return original(self, temporary, *args, **kwargs)

        return run_on_chief(cluster, operation, write)


@hook(saving_lib, "get_temp_dir", "()", when=temporary_folder)
def _get_temp_dir(original, folder):
    """What a chief leaves that is killed lies where the next that saves removes it."""
    return tempfile.mkdtemp(dir=folder)


@hook(saving_lib, "get_attr_skipset", "(obj_type)", when=_left_out.get)
def _get_attr_skipset(original, found, obj_type):
    """Keras makes an optimizer to find it, whose variables are all workers' to make."""
    return found


def _aside(path: str) -> ArraySpill:
    """Where the chief keeps what it has read, until it writes."""
    if "://" in path:
        path = os.path.join(tempfile.gettempdir(), f"keras_strategy-{os.getpid()}")
    return ArraySpill.next_to(pathlib.Path(path))


def _read_by_all(
    model: keras.Model, aside: ArraySpill, is_chief: bool
) -> list[tuple[Any, Any]]:
    """The variables of which each replica has its part, and their values.

    What is split is too large to be kept by workers that do not write it, and all of
    it for the memory of the one that does.
    """
    known = []
    for variable in variables_of(model).values():
        if is_sharded(variable):
            value = keras.ops.convert_to_numpy(variable)
            if is_chief:
                known.append((variable, aside.add(value)))
        elif is_sync_on_read(variable) and variable.aggregation != "none":
            value = keras.ops.convert_to_numpy(variable)
            known.append((variable, keras.ops.convert_to_tensor(value)))
    return known
