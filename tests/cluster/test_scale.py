"""Many clients, and many agreements; `python -m tests.cluster.scale` has more."""

import gc
import time
import tracemalloc

import pytest

from tests.cluster import scale

pytestmark = pytest.mark.full


def test_many_clients_join_exchange_and_see_failure(port):
    begun = time.process_time()
    scale.many_clients(port, 512)
    # Of this process alone, however busy the machine is. It takes less than one.
    assert time.process_time() - begun < 10


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_exchanges_free_memory(port, monkeypatch):
    # What the process has of the system grows with the garbage of other tests, too.
    monkeypatch.setattr(scale, "_resident", _held)
    tracemalloc.start()
    try:
        grown, _ = scale.memory_growth(port, 3_000)
    finally:
        tracemalloc.stop()
    # What each left, of as little as a hundred bytes, would be 600 000 together.
    assert grown < 500_000
