"""The values of variables in a backup, and how they come back on other replicas."""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_strategy.hooks.random import kept_generator, keras_seeds
from keras_strategy.rules import entry_scope, first_values
from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.rules.backup_files import BackupFolder, BackupContents
from keras_strategy.rules.one_writer import run_on_chief
from keras_strategy.rules.sharding import is_sharded

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
        first_values.broadcast_pending_values()  # which the chief could not do alone
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
            with entry_scope.suspend_implicit_scope(None):  # it is the process's
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
