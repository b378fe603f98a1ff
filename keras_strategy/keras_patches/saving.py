"""Where Keras saves: the chief alone writes for all workers.

The values of variables in a backup, and how they come back on other replicas.

Checkpoints of a program's own loop: its models, optimizers, metrics and counters.
"""

import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.data import random
from keras_strategy.keras_patches import consistency
from keras_strategy.keras_patches.dataset_state import has_state, told_by_this_worker
from keras_strategy.keras_patches.patch import home_of, hook, of_workers
from keras_strategy.keras_patches.random import kept_generator, keras_seeds
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.ownership import strategy_of_variable
from keras_strategy.training.resume import (
    ArraySpill,
    BackupContents,
    BackupFolder,
    decode,
    encode,
)
from keras_strategy.training.saving import (
    atomic_write_path,
    run_on_chief,
    temporary_folder,
    variable_value_overrides,
)
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read

saving_lib = home_of("get_temp_dir get_attr_skipset", "keras.src.saving.saving_lib")
# What Keras leaves out where it saves objects of a kind.
_left_out: dict[str, set[str]] = {}


@hook(keras.Model, ("save", "save_weights", "export"), ("filepath",), when=of_workers)
def _save(original, strategy, self, filepath, *args, **kwargs):
    """The chief writes for all workers; what only all can read, they read before."""
    if "Optimizer" not in _left_out:
        _left_out["Optimizer"] = saving_lib.get_attr_skipset("Optimizer")
    ownership.broadcast_pending_values()  # which the chief could not do alone
    path = os.fspath(filepath)
    operation = f"`{original.__name__}` to {os.path.basename(path)}"
    consistency.require_same_values(strategy, self, operation=operation)
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


_PARTS = "/replicas"
Keep = Callable[[np.ndarray], np.ndarray]


class SavedVariables:
    """Reads and sets the variables of a strategy by names, alike on all workers.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._cluster = strategy.extended.cluster

    def read(
        self, variables: Mapping[str, Any], keep: Keep
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a file holds of variables; all workers call it.

        Args:
            variables: The variables by names that all backends have.
            keep: Has those that the replicas share wait until they are written.

        Returns:
            What is no array, of JSON's values, and on the chief the arrays.
        """
        ownership.broadcast_pending_values()  # which the chief could not do alone
        arrays: dict[str, np.ndarray] = {}
        for key, variable in variables.items():
            arrays |= self._arrays(key, variable, keep)
        generator = kept_generator()
        facts = {
            "seed": None if generator is None else generator.state.numpy().tolist(),
            "variables": {key: v.path for key, v in variables.items()},
            "shapes": {key: array.shape for key, array in arrays.items()},
        }
        return facts, arrays

    def _arrays(self, key: str, variable: Any, keep: Keep) -> dict[str, np.ndarray]:
        """What a variable is, and what each replica holds of it where they differ.

        Workers that do not write read what only all of them can.
        """
        arrays = {}
        if is_sync_on_read(variable):
            extended = self._strategy.extended
            parts = np.stack([*map(_numpy, extended.group.components(variable))])
            workers = extended.group.workers
            if workers is not None:
                own = ops.convert_to_tensor(parts)
                parts, _ = workers.gather("a backup's metrics", own, 0)
            arrays[key + _PARTS] = _numpy(parts)
            if variable.aggregation != "none":
                arrays[key] = _numpy(variable.value)
        else:
            writes = self._cluster is None or self._cluster.is_chief
            if is_sharded(variable):
                whole = variable.numpy()  # of which each worker has a part
                if writes:
                    arrays[key] = keep(whole)
            elif writes:
                arrays[key] = _numpy(variable)
        return arrays

    def assign(
        self,
        found: BackupContents,
        variables: Mapping[str, Any],
        left_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Gives variables the values that the chief has read; all workers call it.

        Args:
            found: What the chief has read; its facts, on the other workers.
            variables: The variables by their names.
            left_out: Which of the names in the file need not be among them.
        """
        _compare(found, variables, left_out)
        replicas = self._strategy.num_replicas_in_sync
        local = self._strategy.extended.local_replicas
        shapes, wanted = found.facts["shapes"], {}
        for key, variable in variables.items():
            (before, *_) = shapes.get(key + _PARTS, (0,))
            each = before == replicas > 1
            if not each and key not in shapes:
                raise ValueError(
                    f"Every replica holds its own '{variable.path}', so that the "
                    "training goes on with as many replicas as it was interrupted "
                    f"with. Received: {replicas} replicas, where {found.file} was made "
                    f"with {before}."
                )
            wanted[key + _PARTS if each else key] = variable
        tensors = self._of_chief(found, wanted)
        for (key, variable), tensor in zip(wanted.items(), tensors, strict=True):
            if key.endswith(_PARTS):
                each = [tensor[replica] for replica in local]
                self._strategy.extended.group.assign_components(variable, each)
            else:
                variable.assign(tensor)
        seed = found.facts["seed"]
        if seed is not None:
            with ownership.suspend_implicit_scope(None):  # it is the process's
                generator = kept_generator() or keras_seeds.global_seed_generator()
            generator.state.assign(np.array(seed, generator.state.dtype))

    def _of_chief(self, found: BackupContents, wanted: dict[str, Any]) -> list[Any]:
        """The arrays of the file as tensors, on all workers."""
        shapes, tensors = found.facts["shapes"], []
        for key, variable in wanted.items():
            array = found.arrays.get(key)
            if array is None:
                array = np.zeros(shapes[key], variable.dtype)
            tensors.append(ops.convert_to_tensor(array.astype(variable.dtype)))
        workers = self._strategy.extended.group.workers
        return tensors if workers is None else workers.broadcast("a backup", tensors)


def _compare(
    found: BackupContents, variables: Mapping[str, Any], left_out: Callable[[str], bool]
) -> None:
    held, shapes = found.facts["variables"], found.facts["shapes"]
    missing = [v.path for key, v in variables.items() if key not in held]
    more = [
        path for key, path in held.items() if key not in variables and not left_out(key)
    ]
    if missing or more:
        raise ValueError(
            f"{found.file} was made of another model or optimizer. Variables that "
            f"it lacks: {missing}. Variables that only it has: {more}."
        )
    for key, variable in variables.items():
        if key in shapes and tuple(shapes[key]) != tuple(variable.shape):
            raise ValueError(
                f"{found.file} was made of another model or optimizer: it holds "
                f"{tuple(shapes[key])} for the variable '{variable.path}' of the "
                f"shape {tuple(variable.shape)}."
            )


def read_by_chief(cluster: Any, folder: BackupFolder) -> BackupContents | None:
    """What the chief finds in a folder; what is no array, on the other workers.

    Args:
        cluster: The workers, or None.
        folder: The folder.
    """
    found = run_on_chief(cluster, "what it goes on from", folder.read)
    if cluster is None:
        return found
    told = None if found is None else [found.facts, os.fspath(found.file)]
    told = cluster.exchange("where the training goes on", told)[0]
    if found is None and told is not None:
        return BackupContents(told[0], {}, pathlib.Path(told[1]))
    return found


def _numpy(tensor: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(tensor))


class Checkpoint:
    """Saves and restores what a program trains, to the last bit.

    The states of the generators of random numbers are saved with it.

    Args:
        things: A model; or by names of the user's what has `variables` (models, layers,
            optimizers, metrics), variables, and data with `state_dict()` and
            `load_state_dict(state)`.
        path: The folder.

    Raises:
        ValueError: If there is something else among them, or nothing of a strategy.
    """

    def __init__(self, things: Any, path: str | os.PathLike):
        things = things if isinstance(things, Mapping) else {"": things}
        held = (keras.Variable, keras.Model)
        self._data = {
            name: thing
            for name, thing in things.items()
            if not isinstance(thing, held) and has_state(thing)
        }
        self._things = {n: things[n] for n in things if n not in self._data}
        for name, thing in self._things.items():
            if not hasattr(thing, "variables") and not isinstance(thing, held):
                raise ValueError(
                    "A checkpoint is of models, layers, optimizers, metrics, variables "
                    "and data with `state_dict()`. Received: "
                    f"{name!r} of type {type(thing).__name__}"
                )
        strategies = map(strategy_of_variable, self._variables().values())
        strategy = next(filter(None, strategies), None)
        if strategy is None:
            found = [name or type(t).__name__ for name, t in self._things.items()]
            raise ValueError(
                "A checkpoint is of what was made in the scope of a strategy, and has "
                f"variables by now. Received: {', '.join(found)}"
            )
        self._saved = SavedVariables(strategy)
        self._cluster = strategy.extended.cluster
        self._folder = BackupFolder(path)

    def restore(self) -> int:
        """Takes the values that were saved last, if there are any.

        Returns:
            How many steps had been run then.
        """
        found = read_by_chief(self._cluster, self._folder)
        if found is None:
            return 0
        self._saved.assign(found, self._variables())
        told = told_by_this_worker(found.facts["data"], self._cluster)
        for name, data in self._data.items():
            data.load_state_dict(decode(told[name]))
        random.set_random_state(found.facts["random"])
        return found.facts["steps"]

    def save(self, steps: int) -> None:
        """Saves; all workers call it, and the chief writes."""
        facts, arrays = self._saved.read(self._variables(), self._folder.spill)
        told = [{name: encode(data.state_dict()) for name, data in self._data.items()}]
        if self._data and self._cluster is not None:
            told = self._cluster.exchange("where the data is", told[0])
        facts |= {"steps": steps, "random": random.get_random_state(), "data": told}
        run_on_chief(
            self._cluster, "a checkpoint", lambda: self._folder.write(facts, arrays)
        )

    def _variables(self) -> dict[str, Any]:
        """What is saved now, by names that all backends have."""
        named: dict[str, Any] = {}
        for name, thing in self._things.items():
            if isinstance(thing, keras.Variable):
                own = {"": thing}
            elif isinstance(thing, keras.Model):
                own = variables_of(thing)
            else:
                own = {str(number): v for number, v in enumerate(thing.variables)}
            named |= {f"{name}/{key}".strip("/"): v for key, v in own.items()}
        # Of one that is part of several things, such as a model's optimizer, the first.
        once = {id(variable): key for key, variable in reversed(named.items())}
        return {key: named[key] for key in reversed(once.values())}
