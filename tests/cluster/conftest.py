"""Workers in threads of this process, and in processes of their own."""

import concurrent.futures
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.commands.local_cluster import free_ports
from tests.cluster.short import wait_for_others

WORKER = pathlib.Path(__file__).with_name("worker.py")
# Nothing here takes long, save on a machine that is busy with other things.
SOON = 60.0


def names_of(count: int) -> list[str]:
    return ["chief", *(f"worker {i}" for i in range(count - 1))]


@pytest.fixture
def port() -> int:
    # Not one of those that the system gives to others' connections meanwhile.
    return free_ports(1)[0]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    hook = sys.excepthook
    yield
    left = [t for t in threading.enumerate() if t not in before and t.is_alive()]
    assert not [t.name for t in left if "keras_strategy" in t.name]
    assert sys.excepthook is hook


@pytest.fixture
def together(port):
    """Calls a function of (client, rank) on each of several clients, in threads."""
    clients: list[CoordinatorClient] = []

    def run(
        count: int,
        function: Callable[[CoordinatorClient, int], Any],
        timeout: float = SOON,
    ) -> list[Any]:
        """Return the result of each call, or its exception, by rank."""

        def one(rank: int) -> Any:
            try:
                client = CoordinatorClient(
                    ("127.0.0.1", port), rank, names_of(count), SOON
                )
                clients.append(client)
                wait_for_others(client, timeout)
                return function(client, rank)
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    yield run
    # The chief last, as it is with processes that wait for each other.
    for client in sorted(clients, key=lambda client: -client.rank):
        client.leave()


class Processes:
    """The processes of the workers of one test."""

    def __init__(self, port: int):
        # The workers meet at the port after the chief's.
        self._address = f"127.0.0.1:{port - 1}"
        self.workers: list[subprocess.Popen] = []

    def start(
        self,
        scripts: list[str],
        timeout: float = SOON,
        exit_process: bool = True,
        is_elastic: bool = False,
    ) -> None:
        """Starts a worker for each script, and waits until all have joined."""
        for rank, script in enumerate(scripts):
            arguments = {
                "rank": rank,
                "names": names_of(len(scripts)),
                "addresses": [self._address] + ["127.0.0.1:1"] * (len(scripts) - 1),
                "timeout": timeout,
                "exit_process": exit_process,
                "is_elastic": is_elastic,
                "script": script,
            }
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), json.dumps(arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.reached("joined", *range(len(scripts)))

    def reached(self, line: str, *ranks: int) -> None:
        """Waits until these workers have printed a line."""
        for rank in ranks:
            output = self.workers[rank].stdout
            assert output is not None
            if output.readline() != line + "\n":
                raise AssertionError(self.workers[rank].communicate())

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.workers[rank].send_signal(number)

    def end(self, *ranks: int) -> list[tuple[int, str]]:
        """The status, and what was written to stderr, of workers that end soon."""
        deadline = time.monotonic() + SOON
        ended = []
        for rank in ranks:
            left = max(0.1, deadline - time.monotonic())
            _, errors = self.workers[rank].communicate(timeout=left)
            ended.append((self.workers[rank].returncode, errors))
        return ended


@pytest.fixture
def processes(port):
    """Starts worker processes."""
    made = Processes(port)
    yield made
    for worker in made.workers:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        worker.communicate()
