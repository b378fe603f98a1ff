"""Programs that others wrote equal one device on several replicas."""

import functools
import importlib.util

import pytest

import keras_strategy as ks
from conformance.ports import (
    clients,
    data,
    keras_hub_models,
    keras_io_contrastive,
    keras_io_gans,
    keras_io_generative,
    keras_io_layers,
    keras_io_programs,
    keras_io_sequences,
    keras_io_steps,
    keras_io_supervised,
    parameter_servers,
)
from conformance.ports.port import BACKEND, TOLERANCES, Port, differences
from keras_strategy.testing import WorkerRunner

pytestmark = pytest.mark.full

FILES = [
    parameter_servers,
    keras_io_layers,
    keras_io_programs,
    keras_io_steps,
    keras_io_supervised,
    keras_io_sequences,
    keras_io_contrastive,
    keras_io_gans,
    keras_io_generative,
    keras_hub_models,
    clients,
    data,
]
if importlib.util.find_spec("tensorflow"):
    from conformance.ports import tf_distribute, tf_distribute_programs

    FILES += tf_distribute, tf_distribute_programs
PORTS = {
    value.name: value
    for file in FILES
    for value in vars(file).values()
    if isinstance(value, Port)
}


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("ports", "sample") == "all"
    names = [name for name, port in PORTS.items() if every or port.sample]
    metafunc.parametrize("replicas", [2, 3] if every else [2], ids="{}replicas".format)
    metafunc.parametrize("name", names)


@functools.cache
def on_one_device(name):
    return PORTS[name].train(None)


def in_worker(name):
    """Train a port in a worker."""
    return PORTS[name].train(ks.MultiWorkerMirroredStrategy())


def with_coordinator(name, workers):
    """Train a port in the process of a coordinator."""
    return PORTS[name].train(workers)


@pytest.fixture
def on_replicas(request, mirrored):
    """Trains a port on several replicas, and gives what each process has then."""

    def train(port, replicas):
        if not port.workers and not port.coordinator:
            return [port.train(mirrored(replicas))]
        # What belongs to such a package may start threads as soon as Keras is imported.
        starter = None if port.needs else request.getfixturevalue("starter")
        processes = 1 if port.coordinator else replicas
        with WorkerRunner(processes, timeout_seconds=280, starter=starter) as runner:
            if port.coordinator:
                return runner.run(with_coordinator, port.name, replicas)
            return runner.run(in_worker, port.name)

    return train


def test_port(name, replicas, on_replicas, record_property, caplog):
    port = PORTS[name]
    record_property("source", port.source)
    if port.missing:
        pytest.skip(f"{port.needs} is not installed")
    if BACKEND in port.not_on:
        pytest.skip(port.not_on[BACKEND])
    one = on_one_device(name)
    if BACKEND in port.refused:
        with pytest.raises(Exception, match=port.refused[BACKEND]) as raised:
            on_replicas(port, replicas)
        notes = getattr(raised.value, "__notes__", [])
        record_property("error", "\n".join([str(raised.value), *notes]))
        return
    many = on_replicas(port, replicas)
    said = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and record.name == "keras_strategy"
    ]
    record_property("warning", " ".join(said))
    each = zip(*(differences(one, outcome) for outcome in many), strict=True)
    found = [max(numbers) for numbers in each]
    record_property("difference", max(found))
    assert all(a <= b for a, b in zip(found, TOLERANCES, strict=True)), found
