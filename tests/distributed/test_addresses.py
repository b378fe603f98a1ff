"""Several workers on one host that is given by its own address or name."""

import json
import os
import socket

import keras
import numpy as np
import pytest

import keras_strategy as ks


def read_own_address() -> str:
    """Return the address of the interface with the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket selects a route and sends nothing.
        probe.connect(("203.0.113.1", 9))
        return probe.getsockname()[0]


def train_at(host: str) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Train for one epoch in a cluster whose workers are all at `host`."""
    configuration = json.loads(os.environ["TF_CONFIG"])
    addresses = configuration["cluster"]["worker"]
    configuration["cluster"]["worker"] = [
        f"{host}:{address.rpartition(':')[2]}" for address in addresses
    ]
    os.environ["TF_CONFIG"] = json.dumps(configuration)
    options = ks.experimental.CommunicationOptions(timeout_seconds=20)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.arange(21, dtype="float32").reshape(7, 3) / 21
    model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0)
    hosts = {a.rpartition(":")[0] for a in configuration["cluster"]["worker"]}
    return tuple(hosts), model.get_weights()


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


@pytest.mark.parametrize("kind", ["address", "name"])
def test_workers_on_one_host_connect(kind, two_workers):
    host = find_own_host(kind)
    (hosts, weights), (_, other_weights) = two_workers.run(train_at, host)
    assert hosts == (host,)
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(one, other)


def create_two_strategies() -> str:
    options = ks.experimental.CommunicationOptions
    first = {"communication_options": options(timeout_seconds=60)}
    ks.MultiWorkerMirroredStrategy(**first)
    ks.MultiWorkerMirroredStrategy(**first)
    ks.MultiWorkerMirroredStrategy()
    with pytest.raises(ValueError) as error:
        ks.MultiWorkerMirroredStrategy(communication_options=options(bytes_per_pack=8))
    return str(error.value)


def test_other_options_for_the_same_connection_are_refused(two_workers):
    for message in two_workers.run(create_two_strategies):
        assert "`communication_options` must be equal, or None" in message
        assert "bytes_per_pack=8" in message and "timeout_seconds=60" in message
