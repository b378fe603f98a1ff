import re

import pytest

from keras_strategy.cluster_resolver import (
    MPIClusterResolver,
    SageMakerClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    TPUClusterResolver,
    detect,
)
from keras_strategy.cluster_resolver import detection as cluster_resolver_detection

ORDER = ["TF_CONFIG", "torchrun", "MPI", "SageMaker", "Slurm", "TPU", "Kubernetes"]
TRACES = {
    "TF_CONFIG": {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'},
    "torchrun": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    },
    "MPI": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "SageMaker": {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"},
    "Slurm": {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "CUDA_VISIBLE_DEVICES": "",
    },
    "TPU": {"TPU_NAME": "grpc://127.0.0.1:8470"},
    "Kubernetes": {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "JOB_COMPLETION_INDEX": "3",
        "HOSTNAME": "train-3",
    },
}
RESOLVERS = {
    "TF_CONFIG": TFConfigClusterResolver,
    "torchrun": TorchrunClusterResolver,
    "MPI": MPIClusterResolver,
    "SageMaker": SageMakerClusterResolver,
    "Slurm": SlurmClusterResolver,
    "TPU": TPUClusterResolver,
}


@pytest.fixture(autouse=True)
def a_machine_without_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_resolver_detection, "_ROOT", tmp_path)
    monkeypatch.delenv("HOSTNAME", raising=False)


@pytest.fixture
def trace(monkeypatch):
    def leave(kind, **changes):
        for name, value in {**TRACES.get(kind, {}), **changes}.items():
            monkeypatch.setenv(name, value)

    return leave


def reason(kind):
    return next(f for f in detect().findings if f.name == kind).reason


def test_no_cluster_is_detected():
    detection = detect()
    assert [finding.name for finding in detection.findings] == ORDER
    assert not detection
    assert detection.chosen is None
    assert detection.resolver() is None


@pytest.mark.parametrize("kind", ORDER)
def test_each_environment_is_detected(trace, kind):
    trace(kind)
    detection = detect()
    assert [f.name for f in detection.findings if f.found] == [kind]
    assert detection.chosen.name == kind
    assert f"{kind}: yes, " in str(detection)
    if kind in RESOLVERS:
        assert type(detection.resolver()) is RESOLVERS[kind]


def test_detection_order(trace):
    for kind in reversed(ORDER):
        trace(kind)
        assert detect().chosen.name == kind
    assert all(finding.found for finding in detect().findings)


def test_detection_needs_no_network(trace, monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    for kind in ORDER:
        trace(kind)
    assert len(str(detect()).splitlines()) == len(ORDER)


@pytest.mark.parametrize(
    "value, found, words",
    [
        ("{}", False, 'has no "cluster"'),
        ('{"cluster": {}}', False, 'has no "cluster"'),
        ("{", True, "is not JSON"),
        ("7", True, "is set"),
    ],
)
def test_tf_config_without_a_cluster(trace, value, found, words):
    trace(None, TF_CONFIG=value)
    assert bool(detect()) == found
    assert words in reason("TF_CONFIG")


def test_partial_torchrun_variables_are_ignored(trace):
    trace(None, RANK="0", WORLD_SIZE="2")
    assert not detect()
    assert reason("torchrun") == "MASTER_ADDR, MASTER_PORT are not set"


def test_pmi_of_srun_is_slurm(trace):
    trace("Slurm", PMI_RANK="0", PMI_SIZE="2")
    assert detect().chosen.name == "Slurm"
    assert "srun" in reason("MPI")
    # mpiexec inside a Slurm step: its ranks are not Slurm's.
    trace("Slurm", PMI_RANK="1", PMI_SIZE="4")
    assert detect().chosen.name == "MPI"


def test_slurm_without_a_cluster(trace):
    trace(None, SLURM_JOB_ID="7")
    assert "srun" in reason("Slurm")
    trace("Slurm", SLURM_STEP_NUM_TASKS="1")
    assert not detect()
    assert "one task" in reason("Slurm")


@pytest.mark.parametrize("device", ["accel0", "vfio/0"])
def test_tpu_vm_is_detected(tmp_path, device):
    path = tmp_path / "dev" / device
    path.parent.mkdir(parents=True)
    path.touch()
    assert not detect()
    product = tmp_path / "sys/class/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text("Google Compute Engine\n")
    assert detect().chosen.name == "TPU"
    path.unlink()
    assert not detect()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"HOSTNAME": "train-4"}, "HOSTNAME to end in -3.*'train-4'"),
        ({"HOSTNAME": "-3"}, "HOSTNAME"),
        ({"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": ""}, "not of an Indexed Job"),
    ],
)
def test_pod_without_index_is_ignored(trace, changes, words):
    trace("Kubernetes", **changes)
    assert not detect()
    assert re.search(words, reason("Kubernetes"))
