"""Whether all workers still hold the same values.

They compute the same, so they do, unless somebody changes a variable on one worker
alone, or a device computes wrongly. It is looked at once in an epoch, and before they
are saved.
"""

from typing import Any

import keras

from keras_strategy.core.workers import array_digest
from keras_strategy.errors import WorkersDifferError
from keras_strategy.hooks import mirror_check
from keras_strategy.hooks.mirror_check import mirrored_of


def require_same_values(
    strategy: Any,
    model: keras.Model,
    more: Any = None,
    operation: str = "the end of an epoch",
) -> list[Any]:
    """Compares the variables of a model and its optimizer between the workers.

    Args:
        strategy: The strategy, of several workers.
        model: The model.
        more: A value to tell all workers.
        operation: When this is, for messages.

    Returns:
        What each worker tells, by rank.

    Raises:
        WorkersDifferError: If they hold other values.
        MirrorError: If the replicas of this worker do.
    """
    cluster = strategy.extended.cluster
    variables = mirrored_of(model)
    digests = [_digest(strategy, variable) for variable in variables]
    told, difference = cluster.first_difference(operation, digests, more)
    if difference is None:
        mirror_check.check(strategy, operation, variables)
        return told
    number, each = difference
    path = variables[number].path if number < len(variables) else "which others have"
    groups = cluster.format_by_value(each)
    raise WorkersDifferError(
        f"At {operation} the workers do not hold the same values any more. The first "
        f"variable that differs is '{path}' (digests by worker: {groups}). "
        "Somebody has changed it on some workers alone, such as a callback that not "
        "all of them have."
    )


def _digest(strategy: Any, variable: Any) -> str:
    first = strategy.extended.group.components(variable)[0]
    return array_digest(keras.ops.convert_to_numpy(first))[:12]
