"""The rows of the equality table: what Keras does in a training step."""

from keras_strategy.testing.equality.cases import (
    execution,
    layer,
    loss,
    metric,
    optimizer,
    own,
)
from keras_strategy.testing.equality.cases.case import Case


def all_cases() -> list[Case]:
    """Every row of the table, in the order of the table."""
    return [
        *optimizer.each(),
        *optimizer.at_once(),
        *optimizer.beside_the_rule(),
        *loss.each(),
        *loss.cases(),
        *layer.cases(),
        *metric.each(),
        *metric.at_once(),
        *metric.cases(),
        *own.cases(),
        *execution.cases(),
    ]
