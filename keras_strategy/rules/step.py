"""A Keras training step as the function that every replica runs.

Keras's own loop stays in charge of epochs, callbacks and logs; the function that it
calls for a batch becomes `strategy.run` of the model's step, and a merging of what
the replicas returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategy.core.context import distributed_replica
from keras_strategy.core.protocol import Replica
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.aggregation import is_averaged, is_on_read
from keras_strategy.rules.row_weights import weighted_mean
from keras_strategy.values.distributed import select_replica


def weighted_step(
    step: Callable[[Any], Any], written: set[int]
) -> Callable[[Any, Any], Any]:
    """Makes a step of a model into one that a replica can run.

    Args:
        step: `model.train_step`, `test_step` or `predict_step`: data to outputs.
        written: Takes the ids of the variables that the step assigns.

    Returns:
        A function of the replica's data and its weight, for `strategy.run`.
    """

    def replica_step(data, weight):
        replica = distributed_replica()
        assert replica is not None
        step_state = replica.step = StepState(weight)
        try:
            outputs = step(data)
            written.update(step_state.written)
            average_written_state(replica)
            return outputs
        finally:
            replica.step = StepState()

    return replica_step


def average_written_state(replica: Replica) -> None:
    """Averages the unannotated state that a step wrote, weighted by rows.

    One flat reduction for all of it.
    """
    variables = [v for v in replica.step.written.values() if is_averaged(v)]
    if not variables:
        return
    values = [keras.ops.convert_to_tensor(v.value) for v in variables]
    means = replica.weighted_sum(values, replica.step.row_weight)
    for variable, mean in zip(variables, means, strict=True):
        replica.write(variable, mean)


def rows_of(data: Any) -> int:
    """Returns the rows of a batch: the first dimension that its arrays share.

    Args:
        data: A structure of arrays or tensors, None where something is absent.

    Raises:
        ValueError: If the arrays have different first dimensions, or none.
    """
    return rows_of_arrays(tree.flatten(data))


def rows_of_arrays(arrays: Sequence[Any]) -> int:
    """Returns the rows of a batch, see `rows_of`.

    Args:
        arrays: The leaves of the batch.
    """
    shapes = [tuple(leaf.shape) for leaf in arrays if leaf is not None]
    if not shapes or any(len(shape) == 0 for shape in shapes):
        raise ValueError(
            "A batch must be made of arrays whose first dimension is its rows. "
            f"Received arrays of the shapes {shapes}."
        )
    rows = {shape[0] for shape in shapes}
    if len(rows) > 1:
        raise ValueError(
            "The arrays of a batch must have the same number of rows, their first "
            f"dimension. Received arrays of the shapes {shapes}. If these are single "
            "rows, make batches of them first, with `dataset.batch(batch_size)` or "
            "the like."
        )
    return rows.pop()


def merge_logs(
    model: keras.Model,
    logs: Any,
    replicas: int,
    weights: Sequence[Any],
    written: set[int],
) -> Any:
    """Makes one structure of logs out of what a step returned on every replica.

    Args:
        model: The model, whose metrics are merged over the replicas when read.
        logs: What the replicas returned, joined: a dict of scalars, usually.
        replicas: The number of replicas.
        weights: Their row weights.
        written: The ids of the variables that the step assigned.

    Returns:
        See `chosen_logs`.
    """
    means = mean_logs(logs, replicas, weights)
    if not isinstance(logs, dict):
        return means
    return chosen_logs(model, means, model.get_metrics_result(), written)


def mean_logs(logs: Any, replicas: int, weights: Sequence[Any]) -> Any:
    """The mean of what replicas returned, weighted by rows.

    Args:
        logs: What they returned, joined.
        replicas: Their number.
        weights: Their row weights. If these are of some replicas only, what comes out
            is what these add to the mean.
    """
    parts = [select_replica(logs, replica) for replica in range(replicas)]
    return tree.map_structure(lambda *values: weighted_mean(values, weights), *parts)


def sums_and_metrics(
    model: keras.Model,
    values: Sequence[Any],
    part_of_this_worker: Callable[[Any], Any],
    sum_all: Callable[[list[Any]], Sequence[Any]],
) -> tuple[list[Any], dict[str, Any]]:
    """The sums of the workers' values, and the model's metrics.

    Args:
        model: The model.
        values: This worker's, tensors.
        part_of_this_worker: What this worker adds to an on_read variable's value.
        sum_all: The sums over the workers. It is called once, for all of it.

    Returns:
        The sums, and what `get_metrics_result` gives.
    """
    states = [
        variable
        for variable in model.metrics_variables
        if is_on_read(variable) and variable.aggregation != "none"
    ]
    sums = sum_all([*values, *map(part_of_this_worker, states)])
    merged = list(zip(states, sums[len(values) :], strict=True))
    with keras.StatelessScope(state_mapping=merged):
        return list(sums[: len(values)]), model.get_metrics_result()


def chosen_logs(
    model: keras.Model, means: dict, metrics: dict, written: set[int]
) -> dict[str, Any]:
    """The metric where a key of the logs names one of the model's, else the mean.

    Keras's own tracker of the loss is no such metric for a step that leaves it alone
    and returns its own "loss".

    Args:
        model: The model.
        means: The mean of what the replicas returned.
        metrics: The model's metrics, merged over the replicas.
        written: The ids of the variables that the step assigned.
    """
    for metric in model.metrics:
        if metric.name == "loss" and not written & {id(v) for v in metric.variables}:
            metrics = {key: metrics[key] for key in metrics if key != "loss"}
    return {key: metrics.get(key, mean) for key, mean in means.items()}
