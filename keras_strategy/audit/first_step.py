"""The audit of the first step of `fit`, `evaluate` and `predict`."""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from keras_strategy.audit.report import AuditReport
from keras_strategy.audit.snapshot import find_objects
from keras_strategy.audit.user_code import find_user_code
from keras_strategy.audit.verify import audit_step
from keras_strategy.keras_patches.layers import all_layers

logger = logging.getLogger("keras_strategy")

MODES = ("off", "warn", "raise")
# Set by `config.audit`.
mode = "warn"


class FirstStepAudit:
    """Audits the first step if some of it is the user's; does nothing after that.

    `scope` is a context manager in which workers run collectives.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        strategy: Any,
        scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self._model, self._kind, self._strategy = model, kind, strategy
        self._scope = scope
        self.is_done = strategy.num_replicas_in_sync == 1

    def is_due(self) -> bool:
        """Return True if the next step is to be audited."""
        if self.is_done or mode == "off":
            return False
        if not all(layer.built for layer in all_layers(self._model)):
            return False  # a later step
        self.is_done = find_user_code(find_objects([self._model])) is None
        return not self.is_done

    def run(self, batch: Any) -> None:
        """Audit the step on a global batch, or a worker's rows of it."""
        self.is_done = True
        with self._scope():
            report = self._audit(batch)
        if report is not None and report.differs:
            self._report(report)

    def _audit(self, batch: Any) -> AuditReport | None:
        try:
            report = audit_step(self._model, self._kind, self._strategy, batch)
        except Exception:
            if self._strategy.extended.cluster is not None:
                raise  # other workers may wait for this one
            # The step may need more rows.
            logger.info("The first step could not be audited.", exc_info=True)
            return None
        self.is_done = report is not None
        return report

    def _report(self, report: AuditReport) -> None:
        text = (
            f"{report.message} `ks.verify(model, x, y)` shows the comparison, and "
            '`ks.config.audit("off")` turns it off.'
        )
        if mode == "raise":
            raise RuntimeError(text)
        cluster = self._strategy.extended.cluster
        if cluster is None or cluster.is_chief:
            logger.warning(text)
