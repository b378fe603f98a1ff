"""A Keras training step as the function that every replica runs.

Keras's own loop stays in charge of epochs, callbacks and logs; the function that it
calls for a batch becomes `strategy.run` of the model's step, and a merging of what
the replicas returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategy.core.context import Trial, distributed_replica
from keras_strategy.core.registry import get_engine
from keras_strategy.core.row_range import RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.rules.draws import KnownDraws
from keras_strategy.rules.row_trials import RowTrials, keeps_nothing_else
from keras_strategy.rules.row_weights import weighted_mean
from keras_strategy.rules.state import settle
from keras_strategy.values.distributed import select_replica

A_PART = (
    "A replica computes on its part of a batch, which is divided along the first "
    "dimension of its arrays. If these are not the rows, bring the rows there."
)


def weighted_step(
    step: Callable[[Any], Any],
    logs_are_metrics: bool,
    layers: Callable[[], Sequence[Any]],
    require: Callable[[Any, str], None],
    trials: RowTrials,
    rows_to_predict: Callable[[Any], Any] | None = None,
) -> Callable[[Any, Any, RowRange | None], Any]:
    """Makes a step of a model into one that a replica can run.

    Args:
        step: `model.train_step`, `test_step` or `predict_step`: data to outputs.
        logs_are_metrics: See `returns_metrics`.
        layers: Gives the model's layers.
        require: See `state.settle`.
        trials: What the first step tries.
        rows_to_predict: Gives the rows of a tensor, where the step is one of
            `predict`.

    Returns:
        A function of the replica's data, its weight and which rows these are, None if
        that is not known, for `strategy.run`.
    """
    draws = KnownDraws()

    def rehearsed(data, few):
        if not keeps_nothing_else(layers()):
            return Trial(draws=[])
        return get_engine().rehearse(step, (data,), {}, few)

    def replica_step(data, weight, rows):
        replica = distributed_replica()
        assert replica is not None
        replica.step = StepState(
            weight,
            logs_are_metrics=logs_are_metrics,
            rows=rows,
            draws=draws,
            rehearse=lambda few: rehearsed(data, few),
            warn_unless=trials.of(replica),
        )
        try:
            if replica.step.warn_unless is not None:
                trials.of_model(data, layers())
            outputs = step(data)
            settle(replica, layers, require)
            if rows_to_predict is not None:
                _require_rows(outputs, data, rows_to_predict, require)
            return outputs
        except Exception as error:
            shapes = [str(getattr(x, "shape", None)) for x in tree.flatten(data)]
            error.add_note(f"{A_PART} Here its arrays had the shapes {shapes}.")
            raise
        finally:
            replica.step = StepState()

    return replica_step


def _require_rows(
    outputs: Any,
    data: Any,
    rows: Callable[[Any], Any],
    require: Callable[[Any, str], None],
) -> None:
    """Checks that what a replica predicts can be joined to what one device predicts.

    Args:
        outputs: What `predict_step` returned.
        data: The replica's rows of the batch.
        rows: Gives the rows of a tensor.
        require: See `state.settle`.
    """
    expected = rows(next(leaf for leaf in tree.flatten(data) if leaf is not None))
    for path, output in tree.flatten_with_path(outputs):
        if output is None:
            continue
        shape = getattr(output, "shape", ())
        where = "".join(f"[{key!r}]" for key in path)
        message = (
            "`predict` joins what the replicas predict row by row, so each output "
            "must have one row for each row of the batch. Received the output"
            f"{where and ' ' + where} of shape {shape} from one replica. Give "
            "it as many rows, for example with `ops.broadcast_to`, or leave it out of "
            "the outputs of the model that predicts."
        )
        if shape == ():
            raise ValueError(message)
        require(rows(output) == expected, message)


def returns_metrics(model: keras.Model, kind: str) -> bool:
    """Whether a step returns what `model.get_metrics_result` gives, and no more.

    It does where all methods that lead there are Keras's own.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
    """
    return kind != "predict" and all(
        getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics", "get_metrics_result")
    )


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


def mean_logs(logs: Any, weights: Sequence[Any]) -> Any:
    """The mean of what replicas returned, weighted by rows.

    Args:
        logs: What they returned, joined.
        weights: Their row weights. If these are of some replicas only, what comes out
            is what these add to the mean.
    """
    replicas = len(weights)
    parts = [select_replica(logs, replica, replicas) for replica in range(replicas)]
    return tree.map_structure(lambda *values: weighted_mean(values, weights), *parts)


def metrics_of_workers(
    model: keras.Model,
    part_of_this_worker: Callable[[Any], Any],
    sum_all: Callable[[list[Any]], Sequence[Any]],
) -> dict[str, Any]:
    """What `get_metrics_result` gives, of the states of all workers' metrics.

    Args:
        model: The model.
        part_of_this_worker: What this worker adds to an on_read variable's value.
        sum_all: The sums over the workers. It is called once, for all of it.
    """
    states = [
        variable
        for variable in model.metrics_variables
        if is_on_read(variable) and variable.aggregation != "none"
    ]
    sums = sum_all([part_of_this_worker(variable) for variable in states])
    with keras.StatelessScope(state_mapping=list(zip(states, sums, strict=True))):
        return model.get_metrics_result()
