"""Saving by the chief, and backups that restore on any number of replicas."""

import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.data.sources.iterable import has_state_dict
from keras_strategy.keras_patches import consistency
from keras_strategy.keras_patches.internals import global_state
from keras_strategy.keras_patches.patch import find_module, hook, model_on_workers
from keras_strategy.keras_patches.random import global_generator, keras_seeds
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.checkpoint import BackupContents, BackupFolder, Shard
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.resume import (
    ArraySpill,
    decode,
    encode,
    get_random_state,
    set_random_state,
    state_of_this_worker,
)
from keras_strategy.training.saving import (
    atomic_write_path,
    run_on_chief,
    temporary_folder,
    variable_value_overrides,
)
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read

saving_lib = find_module("get_temp_dir get_attr_skipset", "keras.src.saving.saving_lib")
# Where Keras looks for the attributes of optimizers that it does not save. It creates
# an optimizer to find them, and keeps them under another name.
_OPTIMIZER_SKIPSET = "saving_attr_skiplist_Optimizer"
# Names of seed generators differ between processes.
_SEED_STATE = "seed_generator_state"


@hook(
    keras.Model,
    ("save", "save_weights", "export"),
    ("filepath",),
    when=model_on_workers,
)
def _save(original, strategy, self, filepath, *args, **kwargs):
    """Let the chief write for all workers, after all have read sharded variables."""
    skipset = saving_lib.get_attr_skipset("Optimizer")  # needs all workers
    global_state.set_global_attribute(_OPTIMIZER_SKIPSET, skipset)
    ownership.broadcast_pending_values()  # needs all workers
    path = os.fspath(filepath)
    operation = f"`{original.__name__}` to {os.path.basename(path)}"
    consistency.check_same_values(strategy, self, operation=operation)
    cluster = strategy.extended.cluster
    beside = path
    if "://" in path:
        beside = os.path.join(tempfile.gettempdir(), f"keras_strategy-{os.getpid()}")
    to_disk = ArraySpill(pathlib.Path(beside))
    with to_disk if cluster.is_chief else ArraySpill(None) as spill:
        # Of variables that differ between replicas. Sharded ones are spilled to disk:
        # together they may exceed the chief's memory.
        values = []
        for variable in variables_of(self).values():
            if is_sharded(variable):
                values.append((variable, spill.add(ops.convert_to_numpy(variable))))
            elif is_sync_on_read(variable) and variable.aggregation != "none":
                value = ops.convert_to_numpy(variable)
                values.append((variable, ops.convert_to_tensor(value)))

        def write() -> Any:
            spill.check()
            with atomic_write_path(path) as temporary, variable_value_overrides(values):
                return original(self, temporary, *args, **kwargs)

        return run_on_chief(cluster, operation, write)


@hook(keras.Model, "set_state_tree", "(self, state_tree)", when=strategy_of_model)
def _set_state_tree(original, strategy, self, state_tree):
    """Refuse weights of variables that the model lacks, which Keras skips silently.

    Keras loads an `OrbaxCheckpoint` so. Layers without a `name` get other names in a
    process that has created layers before.
    """
    paths = {v.path for v in self.variables}
    unknown = [
        path
        for kind in ("trainable_variables", "non_trainable_variables")
        for keys, _ in tree.flatten_with_path(state_tree.get(kind, {}))
        if (path := "/".join(keys)) not in paths and not path.endswith(_SEED_STATE)
    ]
    if unknown:
        raise ValueError(
            "Expected values of variables of the model. Received values of others: "
            f"{unknown[:5]}{' and more' if len(unknown) > 5 else ''}. The model's are "
            f"{sorted(paths)[:5]}. Give each layer a `name` before you save, and load "
            "by `load_weights` into a model that you have built."
        )
    return original(self, state_tree)


@hook(saving_lib, "get_temp_dir", "()", when=temporary_folder)
def _get_temp_dir(original, folder):
    """Write temporary files next to the target, so the next save removes leftovers."""
    return tempfile.mkdtemp(dir=folder)


_PER_REPLICA = "/replicas"
# How many bytes of a backup the chief broadcasts together.
_BROADCAST_BYTES = 1 << 26


def read_variables(
    strategy: Any, variables: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray], list[Shard]]:
    """Return JSON values, and copies of arrays and shards; all workers call it."""
    # The arrays are the chief's alone.
    ownership.broadcast_pending_values()  # needs all workers
    group, is_writer = strategy.extended.group, strategy.is_chief
    arrays: dict[str, np.ndarray] = {}
    shards: list[Shard] = []
    shapes: dict[str, Any] = {}
    for key, variable in variables.items():
        if is_sync_on_read(variable):  # every replica's value, too
            values = np.stack([*map(_numpy, group.components(variable))])
            if group.workers is not None:
                local_values = ops.convert_to_tensor(values)
                values, _ = group.workers.gather("a backup's metrics", local_values, 0)
            arrays[key + _PER_REPLICA] = _numpy(values)
            if variable.aggregation != "none":
                arrays[key] = _numpy(variable.value)
        elif is_sharded(variable):
            shapes[key] = tuple(variable.shape)
            for begin, part in group.local_shards(variable):
                shards.append(Shard(key, shapes[key], begin, _numpy(part)))
        elif is_writer:
            arrays[key] = _numpy(variable)
    generator = global_generator()
    facts = {
        "seed": None if generator is None else generator.state.numpy().tolist(),
        "variables": {key: v.path for key, v in variables.items()},
        "shapes": shapes | {key: array.shape for key, array in arrays.items()},
    }
    return facts, arrays, shards


def assign_variables(
    strategy: Any,
    found: BackupContents,
    variables: Mapping[str, Any],
    optional: tuple[str, ...] = (),
) -> None:
    """Assign the values of a backup; all workers call it."""
    # The file may have variables whose keys begin with one of `optional`.
    _check_same_variables(found, variables, optional)
    extended, replicas = strategy.extended, strategy.num_replicas_in_sync
    shapes, wanted = found.facts["shapes"], {}
    for key, variable in variables.items():
        (before, *_) = shapes.get(key + _PER_REPLICA, (0,))
        is_per_replica = before == replicas > 1
        if not is_per_replica and key not in shapes:
            raise ValueError(
                f"Each replica has its own value of '{variable.path}', so the training "
                f"must resume with the same number of replicas. Received: {replicas} "
                f"replicas, but {found.file} was written with {before}."
            )
        wanted[key + (_PER_REPLICA if is_per_replica else "")] = variable
    workers = None if found.is_sharded else extended.group.workers
    # Of sharded files each worker reads one array after the other. Else the chief
    # broadcasts some together.
    for group in _in_groups(wanted, shapes, 0 if workers is None else _BROADCAST_BYTES):
        tensors = []
        for key, variable in group:
            array = found.arrays.get(key)
            if array is None:
                array = np.zeros(shapes[key], variable.dtype)
            tensors.append(ops.convert_to_tensor(array.astype(variable.dtype)))
        if workers is not None:
            tensors = workers.broadcast("a backup", tensors)
        for (key, variable), tensor in zip(group, tensors, strict=True):
            if key.endswith(_PER_REPLICA):
                values = [tensor[replica] for replica in extended.local_replicas]
                extended.group.assign_components(variable, values)
            else:
                variable.assign(tensor)


def _in_groups(
    wanted: Mapping[str, Any], shapes: Mapping[str, Any], least_bytes: int
) -> Iterator[list[tuple[str, Any]]]:
    """Yield successive items of at least so many bytes."""
    group, size = [], 0
    for key, variable in wanted.items():
        group.append((key, variable))
        size += math.prod(shapes[key]) * np.dtype(variable.dtype).itemsize
        if size >= least_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def assign_seed(found: BackupContents) -> None:
    """Assign the state of Keras's global seed generator."""
    seed = found.facts["seed"]
    if seed is not None:
        with ownership.suspend_implicit_scope(None):  # the process's generator
            generator = global_generator() or keras_seeds.global_seed_generator()
        generator.state.assign(np.array(seed, generator.state.dtype))


def _check_same_variables(
    found: BackupContents, variables: Mapping[str, Any], optional: tuple[str, ...]
) -> None:
    saved, shapes = found.facts["variables"], found.facts["shapes"]
    missing = [v.path for key, v in variables.items() if key not in saved]
    unexpected = [
        path
        for key, path in saved.items()
        if key not in variables and not key.startswith(optional)
    ]
    if missing or unexpected:
        raise ValueError(
            f"{found.file} was written by another model or optimizer. Missing "
            f"variables: {missing}. Unexpected variables: {unexpected}. Build the "
            "model and optimizer first: `optimizer.build(model.trainable_variables)`."
        )
    for key, variable in variables.items():
        if key in shapes and tuple(shapes[key]) != tuple(variable.shape):
            raise ValueError(
                f"{found.file} was written by another model or optimizer: it has the "
                f"shape {tuple(shapes[key])} for the variable '{variable.path}' of "
                f"shape {tuple(variable.shape)}."
            )


def _numpy(tensor: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(tensor))


class CheckpointManager:
    """Checkpoints of a custom loop, which resumes from them with the same bits.

    They contain the random states, and fit any number of devices on any backend.

    Args:
        checkpoint: A model; or a dict, by your names, of models, layers, optimizers,
            metrics, variables, and data with `state_dict()` and
            `load_state_dict(state)`, such as a distributed dataset. Build them first.
        directory: The folder, which no other loop may use.
        max_to_keep: How many checkpoints the folder keeps.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        total = keras.Variable(0.0, trainable=False)
    manager = ks.CheckpointManager({"total": total}, "checkpoints", max_to_keep=3)
    for step in range(manager.restore_or_initialize(), 3):
        total.assign_add(1.0)
        manager.save(step + 1)
    assert manager.restore_or_initialize() == float(total) == 3
    ```
    """

    def __init__(
        self, checkpoint: Any, directory: str | os.PathLike, max_to_keep: int = 2
    ):
        things = checkpoint if isinstance(checkpoint, Mapping) else {"": checkpoint}
        types = (keras.Variable, keras.Model)
        self._data = {
            name: thing
            for name, thing in things.items()
            if not isinstance(thing, types) and has_state_dict(thing)
        }
        self._things = {n: things[n] for n in things if n not in self._data}
        for name, thing in self._things.items():
            if not hasattr(thing, "variables") and not isinstance(thing, types):
                raise ValueError(
                    "A checkpoint accepts models, layers, optimizers, metrics, "
                    "variables and data with `state_dict()`. Received: "
                    f"{name!r} of type {type(thing).__name__}"
                )
        strategies = map(ownership.strategy_of_variable, self._variables().values())
        self._strategy: Any = next(filter(None, strategies), None)
        if self._strategy is None:
            found = [name or type(t).__name__ for name, t in self._things.items()]
            raise ValueError(
                "A checkpoint requires objects that were created in the scope of a "
                f"strategy and have variables. Received: {', '.join(found)}"
            )
        self._cluster = self._strategy.extended.cluster
        self._folder = BackupFolder(directory, max_to_keep)
        self._number = 0

    def restore_or_initialize(self) -> int:
        """Restore the last checkpoint, if there is one; all workers call it.

        Returns:
            The `checkpoint_number` that it was saved with; 0 if there is none.
        """
        found = self._folder.read(self._cluster)
        if found is None:
            return 0
        assign_variables(self._strategy, found, self._variables())
        assign_seed(found)
        state = state_of_this_worker(found.facts["data"], self._cluster)
        for name, data in self._data.items():
            data.load_state_dict(decode(state[name]))
        set_random_state(found.facts["random"])
        self._number = found.facts["steps"]
        return self._number

    def save(self, checkpoint_number: int | None = None) -> None:
        """Save; all workers call it, and the chief writes.

        Args:
            checkpoint_number: The number to return when it is restored, such as that of
                the steps so far. By default the last one plus 1.
        """
        number = self._number + 1 if checkpoint_number is None else checkpoint_number
        self._number = int(number)
        variables = self._variables()
        facts, arrays, shards = read_variables(self._strategy, variables)
        states = [
            {name: encode(data.state_dict()) for name, data in self._data.items()}
        ]
        if self._data and self._cluster is not None:
            states = self._cluster.exchange("the dataset state", states[0])
        facts |= {"steps": self._number, "random": get_random_state(), "data": states}
        is_split = any(map(is_sharded, variables.values()))
        self._folder.save(self._cluster, facts, arrays, shards, is_split)

    def _variables(self) -> dict[str, Any]:
        """Return the current variables, by names that all backends have."""
        named: dict[str, Any] = {}
        for name, thing in self._things.items():
            if isinstance(thing, keras.Variable):
                own = {"": thing}
            elif isinstance(thing, keras.Model):
                own = variables_of(thing)
            else:
                own = {str(number): v for number, v in enumerate(thing.variables)}
            named |= {f"{name}/{key}".strip("/"): v for key, v in own.items()}
        # A variable of several objects, such as a model's optimizer, is saved once.
        once = {id(variable): key for key, variable in reversed(named.items())}
        return {key: named[key] for key in reversed(once.values())}
