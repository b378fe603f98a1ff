"""Links between simulated machines that delay, lose, limit or stop frames."""

import concurrent.futures
import contextlib
import os
import socket
import time

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed.links import Links
from tests.distributed.machines import (
    Machine,
    join_as_worker,
    simulated_machines,
    skip_without_namespaces,
)

# Time after which a datagram that has not arrived is lost.
LOST_SECONDS = 0.5


@pytest.fixture(autouse=True)
def _skip_without_namespaces():
    skip_without_namespaces()


@pytest.fixture
def links(tmp_path) -> Links:
    return Links(tmp_path / "links", 3)


def measure_milliseconds(one: Machine, other: Machine, count: int = 5) -> list[float]:
    """Send datagrams to a machine and back, and return how long each took."""
    found = []
    with (
        one.open_socket(socket.SOCK_DGRAM) as client,
        other.open_socket(socket.SOCK_DGRAM) as server,
    ):
        # The first one also waits for the hardware addresses.
        for _ in range(count + 1):
            begin = time.monotonic()
            client.sendto(b"there", server.getsockname())
            server.sendto(server.recv(9), client.getsockname())
            client.recv(9)
            found.append((time.monotonic() - begin) * 1e3)
    return found[1:]


def passes(one: Machine, other: Machine) -> bool:
    """Return True if a datagram from one machine to another arrives."""
    with (
        one.open_socket(socket.SOCK_DGRAM) as client,
        other.open_socket(socket.SOCK_DGRAM) as server,
    ):
        server.settimeout(LOST_SECONDS)
        client.sendto(b"there", server.getsockname())
        try:
            return server.recv(9) == b"there"
        except TimeoutError:
            return False


@pytest.mark.full(keep_on="torch")
def test_delay_counts_in_each_direction():
    with simulated_machines(2, delay_ms=20) as (one, two):
        times = measure_milliseconds(one, two, count=20)
    # Other programs may use the cores. One delay more would be 60.
    assert 40 <= min(times) < 60


@pytest.mark.full(keep_on="torch")
def test_fraction_of_frames_is_lost():
    count, loss = 400, 0.2
    with (
        simulated_machines(2, loss=loss) as (one, two),
        one.open_socket(socket.SOCK_DGRAM) as client,
        two.open_socket(socket.SOCK_DGRAM) as server,
    ):
        server.settimeout(LOST_SECONDS)
        received = 0
        for _ in range(count):
            client.sendto(b"there", server.getsockname())
            time.sleep(0.001)
        with contextlib.suppress(TimeoutError):
            while server.recv(9):
                received += 1
    assert abs(received / count - (1 - loss)) < 0.1


def test_rate_limits_what_a_machine_sends():
    size = 250_000
    with (
        simulated_machines(2, rate_mbit=10) as (one, two),
        one.open_socket(socket.SOCK_STREAM) as client,
        two.open_socket(socket.SOCK_STREAM) as server,
    ):
        server.listen()
        client.connect(server.getsockname())
        connection, _ = server.accept()
        with connection, concurrent.futures.ThreadPoolExecutor(1) as pool:
            begin = time.monotonic()
            # The data may not fit into the sockets' buffers.
            pool.submit(client.sendall, os.urandom(size))
            received = 0
            while received < size:
                received += len(connection.recv(size))
            seconds = time.monotonic() - begin
    # 0.2 s for the data alone, if other programs leave the cores to it.
    assert 0.18 < seconds < 8 * 0.2


@pytest.mark.full(keep_on="torch")
def test_links_change_while_machines_run(links):
    with simulated_machines(3, links=links) as (one, two, three):
        pairs = [(one, two), (two, one), (one, three), (three, two)]

        def find_passing() -> list[bool]:
            return [passes(*pair) for pair in pairs]

        assert find_passing() == [True, True, True, True]
        links.stop_sending(1)
        assert find_passing() == [True, False, True, True]
        links.restore()
        links.stop_receiving(1)
        assert find_passing() == [False, True, True, False]
        links.restore()
        links.separate(0, 1)
        assert find_passing() == [False, False, True, True]
        links.cut(1)
        assert find_passing() == [False, False, True, False]
        links.restore()
        assert find_passing() == [True, True, True, True]
        links.set_all(delay_ms=10)
        assert min(measure_milliseconds(one, two)) >= 20


def train(machines: list[Machine]) -> list[np.ndarray]:
    join_as_worker([machine.address for machine in machines], machines)
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(60, 64)).astype("float32")
    model.fit(x, x[:, :4], batch_size=12, epochs=6, verbose=0)
    return model.get_weights()


@pytest.mark.full
def test_slow_lossy_links_give_the_same_weights(starter):
    found = []
    for options in ({}, {"delay_ms": 20, "loss": 0.01}):
        with (
            simulated_machines(3, **options) as machines,
            WorkerRunner(3, timeout_seconds=120, starter=starter) as runner,
        ):
            found += runner.run(train, machines)
    first, *others = found
    for weights in others:
        for one, other in zip(first, weights, strict=True):
            np.testing.assert_array_equal(one, other)
