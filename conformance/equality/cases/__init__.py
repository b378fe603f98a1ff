"""The rows of the equality table: what Keras does in a training step."""

from conformance.equality.cases import (
    execution,
    layer,
    loss,
    metric,
    optimizer,
    own,
    random,
)
from conformance.equality.cases.case import Case


def all_cases(briefly: bool = False) -> list[Case]:
    """Every row of the table, in the order of the table.

    Args:
        briefly: Whether one row has all optimizers, where Keras can do that, one all
            metrics, some several options of optimizers, and some all layers that draw.
    """
    return [
        *(optimizer.at_once() if briefly else optimizer.each()),
        *optimizer.beside_the_rule(briefly),
        *loss.each(),
        *loss.cases(),
        *layer.cases(),
        *(random.at_once() if briefly else random.each()),
        *(metric.at_once() if briefly else metric.each()),
        *metric.cases(),
        *own.cases(),
        *execution.cases(),
    ]
