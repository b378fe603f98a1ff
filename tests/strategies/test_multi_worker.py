"""MultiWorkerMirroredStrategy before, and without, other workers.

What several workers do together is in tests/distributed.
"""

import builtins
import json
import types
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.strategies import mirrored

TWO = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG."""

    def set_to(cluster, kind, index):
        task = {"type": kind, "index": index}
        config = json.dumps({"cluster": cluster, "task": task})
        monkeypatch.setenv("TF_CONFIG", config)

    return set_to


def is_alone(strategy):
    devices = len(strategy.extended.worker_devices)
    assert strategy.num_replicas_in_sync == devices
    assert strategy.extended.cluster is None
    assert strategy.extended.local_replicas == range(devices)
    return True


def test_behaves_as_mirrored_strategy_without_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = ks.MultiWorkerMirroredStrategy()
    assert is_alone(strategy)
    assert strategy.cluster_resolver is None
    assert strategy.num_replicas_in_sync == 4  # the logical devices of these tests
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((5, 2)), np.ones((5, 1)), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_single_worker_needs_no_connection(tf_config):
    tf_config({"worker": ["127.0.0.1:2222"]}, "worker", 0)
    strategy = ks.MultiWorkerMirroredStrategy()
    assert is_alone(strategy)
    assert strategy.cluster_resolver.task_type == "worker"


def test_evaluator_trains_alone(tf_config):
    tf_config(TWO, "evaluator", 0)
    assert is_alone(ks.MultiWorkerMirroredStrategy())


def test_parameter_server_is_refused(tf_config):
    tf_config({**TWO, "ps": ["127.0.0.1:2224"]}, "ps", 0)
    with pytest.raises(ValueError, match="parameter server"):
        ks.MultiWorkerMirroredStrategy()


def test_unknown_task_is_refused(tf_config):
    tf_config({"chief": ["127.0.0.1:2222"]}, "worker", 0)
    with pytest.raises(ValueError, match="worker"):
        ks.MultiWorkerMirroredStrategy()


def test_notebook_is_refused(tf_config, monkeypatch):
    tf_config(TWO, "worker", 0)
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    with pytest.raises(RuntimeError, match=r"launch\(train, workers=2\)"):
        ks.MultiWorkerMirroredStrategy()


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`cluster_resolver` must be a ClusterResolver"):
        ks.MultiWorkerMirroredStrategy({"worker": []})
    with pytest.raises(TypeError, match="`ks.experimental.CommunicationOptions`"):
        ks.MultiWorkerMirroredStrategy(communication_options="NCCL")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"timeout_seconds": "soon"}, "timeout_seconds='soon'"),
        ({"implementation": "MPI"}, "implementation='MPI'"),
    ],
)
def test_bad_communication_options_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        ks.experimental.CommunicationOptions(**arguments)


def test_communication_options():
    options = ks.experimental.CommunicationOptions(implementation="nccl")
    nccl = ks.experimental.CommunicationImplementation.NCCL
    assert options.implementation is nccl
    assert options == ks.experimental.CommunicationOptions(implementation=nccl)


def test_several_gpus_of_one_process_are_logged(caplog):
    mirrored._log_if_in_turns(("cpu:0", "cpu:1"))
    mirrored._log_if_in_turns(("gpu:0",))
    assert not caplog.messages
    mirrored._log_if_in_turns(("gpu:1", "gpu:2"))
    named = ["--workers auto" in text for text in caplog.messages]
    assert named == [True] * (keras.backend.backend() == "torch")


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="others share no GPUs")
@pytest.mark.parametrize(
    ("addresses", "visible", "share"),
    [
        (["node1", "node1"], [None, None], ("gpu:2", "gpu:3")),
        (["[::1]:80", "[::1]:81"], ["0,1,2,3"] * 2, ("gpu:2", "gpu:3")),
        (["fe80::1", "fe80::2"], [None, None], ("gpu:0", "gpu:1", "gpu:2", "gpu:3")),
        # The launcher has divided them.
        (["a:1", "a:2"], ["0,1,2,3", "4,5,6,7"], ("gpu:0", "gpu:1", "gpu:2", "gpu:3")),
    ],
)
def test_workers_share_a_machines_gpus(addresses, visible, share):
    workers: Any = types.SimpleNamespace(
        addresses=addresses, rank=1, exchange=lambda *_: visible
    )
    devices = tuple(f"gpu:{index}" for index in range(4))
    assert mirrored._local_devices(devices, workers) == share
