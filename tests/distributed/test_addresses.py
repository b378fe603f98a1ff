"""Workers that are given by the addresses or names of their machines."""

import json
import os
import socket
from collections.abc import Sequence

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.cluster.process_exit import (
    EXIT_CLUSTER_NOT_FORMED,
    EXIT_OTHER_WORKER_FAILED,
)
from keras_strategy.testing import WorkerRunner
from tests.distributed.machines import (
    Machine,
    join_as_worker,
    simulated_machines,
    skip_without_namespaces,
)

TIMEOUT_SECONDS = 20


def read_own_address() -> str:
    """Return the address of the interface with the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket selects a route and sends nothing.
        probe.connect(("203.0.113.1", 9))
        return probe.getsockname()[0]


def train_at(
    hosts: Sequence[str], machines: Sequence[Machine] = ()
) -> list[np.ndarray]:
    """Train for one epoch in a cluster whose workers are at `hosts`."""
    join_as_worker(hosts, machines)
    options = ks.experimental.CommunicationOptions(timeout_seconds=TIMEOUT_SECONDS)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.arange(21, dtype="float32").reshape(7, 3) / 21
    model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


def check_same_weights(results: Sequence[list[np.ndarray]]) -> None:
    first, *others = results
    for weights in others:
        for one, other in zip(first, weights, strict=True):
            np.testing.assert_array_equal(one, other)


def find_own_host(kind: str) -> str:
    if kind == "name":
        host = socket.gethostname()
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            pytest.skip(f"this host cannot resolve its own name, {host!r}")
        return host
    try:
        return read_own_address()
    except OSError:
        pytest.skip("this host has no route, so no address but the loopback's")


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize("kind", ["address", "name"])
def test_workers_on_one_host_connect(kind, two_workers):
    host = find_own_host(kind)
    check_same_weights(two_workers.run(train_at, [host, host]))


# How machines are made, and the names or addresses by which the workers are given.
NETWORKS = {
    "addresses": ({}, ["10.77.0.1", "10.77.0.2"]),
    # As Debian and Ubuntu set up /etc/hosts.
    "own name on the loopback": ({"own_name": "127.0.1.1"}, ["node1", "node2"]),
    "no own name": ({"own_name": None}, ["10.77.0.1", "10.77.0.2"]),
    "name of the wrong interface": (
        {"wrong_interface": True},
        ["10.77.0.1", "10.77.0.2"],
    ),
    "IPv6 only": ({"ipv6": True}, ["fd77::1", "fd77::2"]),
}


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize("network", NETWORKS)
def test_workers_on_several_machines_connect(network, two_workers):
    skip_without_namespaces()
    options, hosts = NETWORKS[network]
    with simulated_machines(2, **options) as machines:
        check_same_weights(two_workers.run(train_at, hosts, machines))


@pytest.mark.full(keep_on="jax")
def test_workers_that_share_a_machine_connect_to_others(starter):
    skip_without_namespaces()
    with (
        simulated_machines(2, own_name="127.0.1.1") as (one, two),
        WorkerRunner(3, timeout_seconds=120, starter=starter) as runner,
    ):
        hosts = ["node1", "node1", "node2"]
        check_same_weights(runner.run(train_at, hosts, [one, one, two]))


@pytest.mark.full(keep_on="tensorflow")
def test_blocked_connection_is_reported(starter):
    skip_without_namespaces()
    with (
        simulated_machines(3, blocked=[(2, 1)]) as machines,
        WorkerRunner(3, timeout_seconds=120, starter=starter) as runner,
    ):
        hosts = [machine.address for machine in machines]
        runner.start(train_at, hosts, machines)
        ends = runner.wait()
    for end in ends:
        assert end.exit_status in (EXIT_CLUSTER_NOT_FORMED, EXIT_OTHER_WORKER_FAILED)
        assert end.seconds < TIMEOUT_SECONDS
        # The answers of worker 2 do not arrive, and it has no route itself.
        for text in (
            "worker 1, at 10.77.0.2, cannot connect to worker 2 at 10.77.0.3:",
            "timed out\nworker 2, at 10.77.0.3, cannot connect to worker 1 at",
            "KERAS_STRATEGY_INTERFACE",
            "ports",
        ):
            assert text in end.output
    assert EXIT_CLUSTER_NOT_FORMED in {end.exit_status for end in ends}


def train_with_unknown_interface() -> None:
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        os.environ["KERAS_STRATEGY_INTERFACE"] = "eth7"
    train_at(["127.0.0.1"] * 2)


@pytest.mark.full(keep_on="jax")
def test_unknown_interface_ends_all_workers(two_workers):
    two_workers.start(train_with_unknown_interface)
    ends = two_workers.wait()
    assert [end.exit_status for end in ends] == [EXIT_OTHER_WORKER_FAILED, 1]
    for end in ends:
        assert "Expected `interface`" in end.output and "'eth7'" in end.output


def create_two_strategies() -> str:
    options = ks.experimental.CommunicationOptions
    first = {"communication_options": options(timeout_seconds=60)}
    ks.MultiWorkerMirroredStrategy(**first)
    ks.MultiWorkerMirroredStrategy(**first)
    ks.MultiWorkerMirroredStrategy()
    with pytest.raises(ValueError) as error:
        ks.MultiWorkerMirroredStrategy(communication_options=options(bytes_per_pack=8))
    return str(error.value)


@pytest.mark.full(keep_on="tensorflow")
def test_other_options_for_the_same_connection_are_refused(two_workers):
    for message in two_workers.run(create_two_strategies):
        assert "`communication_options` must be equal, or None" in message
        assert "bytes_per_pack=8" in message and "timeout_seconds=60" in message
