"""Calling a step as on one device, so that nothing is left of it but what it drew."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategy.core.context import DryRun, dry_run_scope
from keras_strategy.core.own_attributes import discard_attribute_changes
from keras_strategy.core.random_states import preserve_random_states
from keras_strategy.hooks.random import global_state

logger = logging.getLogger("keras_strategy")
# What Keras keeps for a thread while a layer is called.
_OF_A_CALL = ("current_call_ctx", "autocast_scope")


@contextlib.contextmanager
def rehearsing() -> Iterator[DryRun]:
    """Surrounds a call of a step, in the middle of another one.

    What it assigns to variables, sets on layers and draws is forgotten. It ends where a
    variable is made or an optimizer applies gradients, and at the first error, which
    is no matter: some functions take a batch of a certain size alone.

    Yields:
        What becomes known: what was drawn until then.
    """
    before = {name: global_state.get_global_attribute(name) for name in _OF_A_CALL}
    with (
        preserve_random_states(),
        dry_run_scope() as trial,
        discard_attribute_changes(),
        keras.StatelessScope(),
    ):
        trial.draws = []
        try:
            for name in _OF_A_CALL:
                global_state.set_global_attribute(name, None)
            yield trial
        except Exception:
            logger.debug("A rehearsal of a step ended.", exc_info=True)
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


def with_rows(take: Callable[[Any], Any], structure: Any) -> Any:
    """Arguments of a step with other rows.

    Args:
        take: Makes of a tensor one with these rows.
        structure: The arguments.
    """
    return keras.tree.map_structure(
        lambda x: take(x) if len(getattr(x, "shape", ())) > 0 else x, structure
    )
