"""Checkpoints of a program's own loop: its models, optimizers, metrics and counters."""

import os
from collections.abc import Mapping
from typing import Any

import keras

from keras_strategy.hooks.data_states import has_state, told_by_this_worker
from keras_strategy.hooks.saved_variables import SavedVariables, read_by_chief
from keras_strategy.hooks.variables import variables_of
from keras_strategy.input import seeds
from keras_strategy.rules.backup_files import BackupFolder
from keras_strategy.rules.one_writer import run_on_chief
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.rules.plain import encode, decode


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
        seeds.set_random_state(found.facts["random"])
        return found.facts["steps"]

    def save(self, steps: int) -> None:
        """Saves; all workers call it, and the chief writes."""
        facts, arrays = self._saved.read(self._variables(), self._folder.spill)
        told = [{name: encode(data.state_dict()) for name, data in self._data.items()}]
        if self._data and self._cluster is not None:
            told = self._cluster.exchange("where the data is", told[0])
        facts |= {"steps": steps, "random": seeds.get_random_state(), "data": told}
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
