"""The result of an audit: what differs between several replicas and one device."""

import math
from dataclasses import dataclass, field
from typing import Any

GATHER = "`ks.get_replica_context().all_gather(x, axis=0)`"

_ROW_DEPENDENCE = (
    "its result for a row depends on the other rows of the batch, on their number, or "
    "on random numbers that Keras's seeds do not decide. Each replica computes it from "
    f"its local rows. To use all rows, gather them: {GATHER}. Draw with `keras.random` "
    "and a `keras.random.SeedGenerator`."
)
_ADVICE = {
    "call": _ROW_DEPENDENCE,
    "loss": (
        "its value, with what layers pass to `add_loss`, is not a mean over the rows "
        "of a batch. Each replica computes it from its local rows, and the mean of "
        "these is used. Divide a sum by the number of rows, `ops.shape(x)[0]`. To "
        f"compare all rows, gather them: {GATHER}."
    ),
    "gradient": (
        "they are not means over the rows of a batch: each replica computes them from "
        "its local rows, and their mean is applied. Divide a sum by the number of "
        "rows, `ops.shape(x)[0]`; clip with the optimizer (`global_clipnorm`); to "
        f"compare all rows, gather them: {GATHER}."
    ),
    "gradient in run": (
        "their sum over the replicas is applied. Divide the loss by the rows of all "
        "replicas, as `ks.compute_average_loss` does, not by local rows as `ops.mean` "
        "does. Clip with the optimizer (`global_clipnorm`), which has the sum."
    ),
    "metric": (
        "the state that replicas compute from their local rows does not add up to one "
        "device's. Use variables for sums over rows. For other state, create them with "
        '`aggregation="only_first_replica"` and assign values that are equal on all '
        f"replicas: {GATHER} gathers all rows. State outside of variables is each "
        "replica's own."
    ),
    "state": (
        "the step assigns them from local rows. Gather all rows first "
        f"({GATHER}), or create the variables with an `aggregation`."
    ),
    "log": (
        "it is not a mean over the rows of a batch, and the mean of the replicas' "
        f"numbers is logged. Log it with a metric, or gather all rows: {GATHER}."
    ),
    "prediction": _ROW_DEPENDENCE,
}


_HEAD = "value", "name", "difference", "tolerance", ""


@dataclass(frozen=True)
class ComparedValue:
    """A value that replicas and one device have computed.

    Attributes:
        kind: `"loss"`, `"gradient"`, `"state"`, `"log"` or `"prediction"`.
        name: The path of the variable, or the name of the log.
        difference: The largest difference, relative to the largest entry.
        tolerance: The relative difference that rounding may cause.
    """

    kind: str
    name: str
    difference: float
    tolerance: float

    @property
    def differs(self) -> bool:
        """True if the difference is larger than the tolerance."""
        return self.difference > self.tolerance


@dataclass
class AuditReport:
    """Comparison of a step on several replicas with the same step on one device.

    `print(report)` shows a table, as a notebook does for the value of a cell.

    Attributes:
        what: The audited step, in words.
        values: All compared values, as `ComparedValue`.
        place: What differs first: a layer, operation, loss, optimizer, metric or
            method, in words; "" if nothing does, or if it was not found.
        cause: `"call"`, `"loss"`, `"gradient"`, `"gradient in run"`, `"metric"`,
            `"state"`, `"log"` or `"prediction"`; "" if nothing differs.
        failure: The error of a step that failed, on a replica's rows or on one device;
            "" if none did.

    Example:

    ```python
    import keras
    import keras_strategy as ks
    import numpy as np

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report = ks.verify(model, np.ones((8, 4)), np.ones((8, 1)))
    assert isinstance(report, ks.AuditReport) and not report.differs
    ```
    """

    what: str
    values: list[ComparedValue] = field(default_factory=list)
    place: str = ""
    cause: str = ""
    failure: str = ""
    # The layer, operation or loss whose own result differs, if one was found.
    part: Any = field(default=None, init=False, repr=False)

    @property
    def differs(self) -> bool:
        """True if replicas compute something else than one device, or if one fails."""
        return bool(self.failure) or any(value.differs for value in self.values)

    @property
    def remedy(self) -> str:
        """Remedy of `fit`: `"split"` over the replicas, or run `"whole"`."""
        # Or it computes one part on gathered rows, if that is the cause.
        return "whole" if self.differs else "split"

    @property
    def advice(self) -> str:
        """The reason of a difference and what to do, in words; "" without one."""
        return _ADVICE.get(self.cause, "") if self.differs else ""

    def largest(self, kind: str | None = None) -> ComparedValue | None:
        """Return the value that differs most beyond its tolerance.

        Args:
            kind: A kind of `ComparedValue`; None for any.

        Returns:
            The value, or None if none of this kind was compared.
        """
        values = [x for x in self.values if kind is None or x.kind == kind]
        return max(values, key=lambda x: x.difference / x.tolerance, default=None)

    @property
    def message(self) -> str:
        """The result in one paragraph."""
        if not self.differs:
            return f"{self.what} equals one device's."
        if self.failure:
            return f"{self.what} fails on a part of a batch: {self.failure}"
        worst = self.largest()
        assert worst is not None
        where = f" It begins with {self.place}: {self.advice}" if self.place else ""
        is_number = math.isfinite(worst.difference)  # else another kind of value
        size = f" by {worst.difference:.1e} of its size" if is_number else ""
        return (
            f"{self.what} differs from one device's: the {worst.kind} '{worst.name}'"
            f"{size}.{where}"
        )

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        def row(x):
            sizes = f"{x.difference:.1e}", f"{x.tolerance:.1e}"
            return x.kind, x.name, *sizes, "differs" * x.differs

        order = sorted(self.values, key=lambda x: -x.difference / x.tolerance)
        return list(map(row, order))

    def __str__(self) -> str:
        width = max([len(x.name) for x in self.values], default=0)
        form = f"{{:<10}}  {{:<{width}}}  {{:>10}}  {{:>9}}  {{}}"
        lines = (form.format(*row).rstrip() for row in (_HEAD, *self._rows()))
        return "\n".join([self.message, *lines])
