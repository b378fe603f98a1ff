"""The names of tf.distribute's strategies that are older than TensorFlow 2.

Those that are another name of something are kept, with a warning. The others belong to
sessions and iterators of TensorFlow 1, and say what to use.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_strategy.core.refused import UnsupportedName

if TYPE_CHECKING:
    from keras_strategy.strategies.extended import StrategyExtended


_SESSIONS = (
    "It sets up a session of TensorFlow 1. The Keras backend is set up by itself; "
    "leave it out."
)


class OldNames:
    """The old names, for `Strategy` to inherit."""

    extended: "StrategyExtended"
    run: Callable[..., Any]
    experimental_local_results: Callable[[Any], Any]

    configure = UnsupportedName(_SESSIONS)
    update_config_proto = UnsupportedName(_SESSIONS)
    make_dataset_iterator = UnsupportedName(
        "It makes an iterator of TensorFlow 1. Use "
        "`iter(strategy.experimental_distribute_dataset(dataset))`."
    )
    make_input_fn_iterator = UnsupportedName(
        "It makes an iterator of TensorFlow 1. Use "
        "`iter(strategy.distribute_datasets_from_function(dataset_fn))`."
    )
    group = UnsupportedName(
        "It joins operations of a graph of TensorFlow 1 into one. Operations run in "
        "the order of the program; return the values that you need."
    )

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The old name of `experimental_local_results`."""
        _warn("Strategy.unwrap", "strategy.experimental_local_results")
        return self.experimental_local_results(value)

    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """The old place of `extended.colocate_vars_with`."""
        _warn("Strategy.colocate_vars_with", "strategy.extended.colocate_vars_with")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None):
        """The old form of `run`, which takes the next element of an iterator."""
        _warn("Strategy.experimental_run", "strategy.run(fn, args=(next(iterator),))")
        args = () if input_iterator is None else (next(input_iterator),)
        return self.run(fn, args)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"tf.distribute deprecates `{old}`. Use `{new}`.",
        DeprecationWarning,
        stacklevel=3,
    )
