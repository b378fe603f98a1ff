"""keras_strategy's MirroredStrategy on logical CPU devices.

It follows docs/fit.md, with the defaults.
"""

import logging
from typing import Any

import keras_strategy as ks
from conformance.program import Program
from conformance.systems.training import Outcome, build, fit


class _Messages(logging.Handler):
    """Handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def prepare(replicas: int) -> None:
    ks.config.set_logical_devices("cpu", replicas)


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    messages = _Messages()
    logger = logging.getLogger("keras_strategy")
    logger.addHandler(messages)
    try:
        strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
        with strategy.scope():
            model = build(program, initial)
        outcome = fit(model, program)
    finally:
        logger.removeHandler(messages)
    outcome.warnings = messages.texts
    return outcome
