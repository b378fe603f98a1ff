"""Slow-operation warnings name the operation, once."""

import logging
import threading

import pytest

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster.watchdog import Operation
from tests.cluster.conftest import SOON, names_of


class Lines(logging.Handler):
    """Return the log, and True if it has a slow-operation warning."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        self.arrived = threading.Condition()

    def emit(self, record):
        with self.arrived:
            self.lines.append(record.getMessage())
            self.arrived.notify_all()

    def wait_for(self, part):
        with self.arrived:
            there = self.arrived.wait_for(
                lambda: any(part in line for line in self.lines), SOON
            )
        assert there, self.lines


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(watchdog, "SLOW_OPERATION_SECONDS", 0.05)
    handler = Lines()
    logger = logging.getLogger("keras_strategy")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_slow_rendezvous_names_missing_workers(port, lines):
    clients: dict[int, CoordinatorClient] = {}

    def worker(rank):
        address = ("127.0.0.1", port)
        clients[rank] = CoordinatorClient(address, rank, names_of(2), SOON)
        if rank == 0:
            clients[rank].exchange("the first step")

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in (1, 0)]
    threads[0].start()
    lines.wait_for(f"worker 0 has waited for chief at 127.0.0.1:{port} to arrive")
    threads[1].start()
    threads[0].join()
    lines.wait_for("chief has been in `the first step` for")
    clients[1].exchange("the first step")
    threads[1].join()
    for rank in (1, 0):
        clients[rank].leave()


def test_connected_worker_reports_waiting(port, lines):
    clients: list[CoordinatorClient] = []

    def chief():
        clients.append(CoordinatorClient(("127.0.0.1", port), 0, names_of(2), SOON))

    thread = threading.Thread(target=chief)
    thread.start()
    # For whom, it has heard or not: the time is short here.
    lines.wait_for("chief has waited for ")
    other = CoordinatorClient(("127.0.0.1", port), 1, names_of(2), SOON)
    thread.join()
    other.leave()
    clients[0].leave()


def test_slow_operation_is_reported_once(caplog):
    of_worker = watchdog.Watchdog(0, ["worker 1"], 600, 0.0, print, print)
    for count in range(3):
        of_worker.warn_if_slow(Operation(count, "the train step", 0.0), 9.9)
    assert not caplog.messages
    for count in range(3):
        of_worker.warn_if_slow(Operation(count, "the train step", 0.0), 12.2)
    of_worker.warn_if_slow(Operation(4, "`save` to a.keras", 0.0, 60.0), 12.2)
    assert caplog.messages == [
        "worker 1 has been in `the train step` for 12 s, where workers wait for each "
        "other. It gives up after 600 s.",
        "worker 1 has been in `save` to a.keras for 12 s, where workers wait for each "
        "other. It gives up after 60 s.",
    ]
