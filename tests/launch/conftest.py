"""The launcher's own process, as users start it."""

import pytest


@pytest.fixture(autouse=True)
def _no_logical_cpus(monkeypatch):
    # Where it is set, the package imports Keras at once. The suite sets it.
    monkeypatch.delenv("KERAS_STRATEGY_LOGICAL_CPUS", raising=False)
