"""torchrun, MPI and SageMaker: what a launcher's variables tell."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_strategy
from keras_strategy.cluster_resolver import (
    MPIClusterResolver,
    SageMakerClusterResolver,
    TorchrunClusterResolver,
)

ROOT = str(Path(keras_strategy.__file__).parents[1])
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
# As Open MPI 5.0 and MPICH 5.0 set them for the second of two local processes.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.fixture
def env(monkeypatch):
    def set_to(variables, **others):
        for name, value in {**variables, **others}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_to


def workers(resolver):
    assert resolver.cluster_spec().jobs == ["worker"]
    assert resolver.task_type == "worker"
    return resolver.cluster_spec().job_tasks("worker")


def test_torchrun(env):
    env(TORCHRUN, LOCAL_RANK="1")
    resolver = TorchrunClusterResolver(rpc_layer="grpc")
    assert workers(resolver) == ["node1:29500", "", "", ""]
    assert (resolver.task_id, resolver.local_rank) == (3, 1)
    assert resolver.master("worker", 0) == "grpc://node1:29500"


def test_torchrun_on_one_host(env):
    env(TORCHRUN, LOCAL_WORLD_SIZE="4")
    addresses = [f"node1:{port}" for port in range(29500, 29504)]
    assert workers(TorchrunClusterResolver()) == addresses
    assert workers(TorchrunClusterResolver(port=7))[3] == "node1:10"


def test_torchrun_on_two_hosts(env):
    env(TORCHRUN, LOCAL_WORLD_SIZE="2")
    assert workers(TorchrunClusterResolver()) == ["node1:29500", "node1:29501", "", ""]


def test_torchrun_store_keeps_its_port(env):
    env(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True")
    assert workers(TorchrunClusterResolver())[0] == "node1:29501"
    assert workers(TorchrunClusterResolver(port=29500))[0] == "node1:29500"


def test_torchrun_without_a_local_rank(env):
    env(TORCHRUN)
    assert TorchrunClusterResolver().local_rank is None


def test_ipv6(env):
    env(TORCHRUN, MASTER_ADDR="fe80::1")
    assert workers(TorchrunClusterResolver())[0] == "[fe80::1]:29500"


@pytest.mark.parametrize("missing", TORCHRUN)
def test_torchrun_names_what_is_missing(env, missing):
    env(TORCHRUN, **{missing: None})
    with pytest.raises(RuntimeError, match=f"{missing} to be set, as torchrun does"):
        TorchrunClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"RANK": "x"}, "RANK to be an integer >= 0. Received: 'x'"),
        ({"RANK": "-1"}, "RANK to be an integer"),
        ({"RANK": "4"}, r"RANK to be less than WORLD_SIZE \(4\). Received: 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE to be an integer >= 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT to be a port up to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_torchrun_refuses_bad_variables(env, wrong, words):
    env(TORCHRUN, **wrong)
    with pytest.raises(ValueError, match=words):
        TorchrunClusterResolver().cluster_spec()


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="starts torchrun")
def test_real_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, socket\n"
        "from keras_strategy.cluster_resolver import detect\n"
        "detection = detect()\n"
        "resolver = detection.resolver()\n"
        "spec = resolver.cluster_spec()\n"
        "own = spec.task_address('worker', resolver.task_id)\n"
        "with socket.socket() as listener:\n"
        "    listener.bind(('', int(own.rpartition(':')[2])))\n"
        f"    name = os.path.join({str(tmp_path)!r}, str(resolver.task_id))\n"
        "    json.dump([detection.chosen.name, spec.as_dict(), resolver.local_rank],\n"
        "              open(name, 'w'))\n"
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": ROOT},
        check=True,
        timeout=240,
        capture_output=True,
    )
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert (first[0], first[2], second[2]) == ("torchrun", 0, 1)
    assert first[1] == second[1]
    assert len(first[1]["worker"]) == 2


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH])
def test_mpi_on_one_host(env, variables):
    env(variables)
    resolver = MPIClusterResolver(rpc_layer="grpc")
    assert workers(resolver) == ["127.0.0.1:8888", "127.0.0.1:8889"]
    assert (resolver.task_id, resolver.local_rank) == (1, 1)
    assert resolver.master() == "grpc://127.0.0.1:8889"


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH])
def test_mpi_on_two_hosts(env, variables):
    local_size = list(variables)[3]
    env(variables, **{local_size: "1"})
    with pytest.raises(RuntimeError, match="MASTER_ADDR.*coordinator_address"):
        MPIClusterResolver().cluster_spec()
    assert workers(MPIClusterResolver("node1")) == ["node1:8888", ""]
    env({}, MASTER_ADDR="node2", MASTER_PORT="99")
    assert workers(MPIClusterResolver()) == ["node2:99", ""]
    assert workers(MPIClusterResolver("node1", port_base=7)) == ["node1:7", ""]


def test_mpi_job_identity(env):
    env(OPEN_MPI, PMIX_NAMESPACE="2412511233")
    assert MPIClusterResolver().job_identity == "2412511233"
    env(OPEN_MPI, PMIX_NAMESPACE=None)
    assert MPIClusterResolver().job_identity == ""


def test_mpich_job_identity(env, tmp_path):
    """Hydra's process on this host has made a pair of sockets, and starts the workers.

    This process stands for it, and a shell that ends with another command does not
    become Python.
    """
    env(MPICH, PMI_JOBID=None)
    program = (
        "from keras_strategy.cluster_resolver import MPIClusterResolver\n"
        "print(MPIClusterResolver().job_identity)"
    )

    def identity_of_worker(**variables: str) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program]
            found = subprocess.run(
                command,
                env={**os.environ, "PMI_FD": str(theirs.fileno()), **variables},
                pass_fds=[theirs.fileno()],
                check=True,
                capture_output=True,
                text=True,
            )
        return found.stdout.strip()

    assert identity_of_worker() == f"hydra {os.getpid()}"
    assert identity_of_worker(PMI_JOBID="7.0") == "7.0"  # Cray's
    assert identity_of_worker(MPI_LOCALNRANKS="1") == ""  # several hosts
    assert identity_of_worker(PMI_FD="99") == ""  # closed by another launcher


def test_mpi_without_local_size(env):
    env(MPICH, MPI_LOCALNRANKS=None, MPI_LOCALRANKID=None, MASTER_ADDR="node1")
    assert workers(MPIClusterResolver()) == ["node1:8888", ""]
    assert MPIClusterResolver().local_rank is None


@pytest.mark.parametrize(
    "address, expected",
    [
        ("node1:5", "node1:5"),
        ("fe80::1", "[fe80::1]:8888"),
        ("[fe80::1]:5", "[fe80::1]:5"),
        ("[fe80::1]", "[fe80::1]:8888"),
    ],
)
def test_mpi_coordinator_addresses(env, address, expected):
    env(OPEN_MPI)
    assert workers(MPIClusterResolver(address))[0] == expected


def test_mpi_refuses_bad_variables(env):
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_RANK.*PMI_RANK"):
        MPIClusterResolver().cluster_spec()
    env(OPEN_MPI)
    with pytest.raises(ValueError, match="coordinator_address.*'x'"):
        MPIClusterResolver("node1:x").cluster_spec()
    with pytest.raises(ValueError, match="port.*65536"):
        MPIClusterResolver(port_base=65536)
    env(OPEN_MPI, OMPI_COMM_WORLD_RANK="2")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK to be less than"):
        MPIClusterResolver().task_id  # noqa: B018


def test_sagemaker(env):
    env(SAGEMAKER)
    resolver = SageMakerClusterResolver(rpc_layer="grpc")
    assert workers(resolver) == ["algo-1:2223", "algo-2:2223"]
    assert resolver.task_id == 1
    assert resolver.master() == "grpc://algo-2:2223"
    assert SageMakerClusterResolver(port=5, task_id=0).master() == "algo-1:5"


def test_sagemaker_with_one_host(env):
    env(SAGEMAKER, SM_HOSTS='["algo-2"]')
    assert SageMakerClusterResolver().master() == ""


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ({"SM_HOSTS": None}, RuntimeError, "SM_HOSTS to be set, as a SageMaker"),
        ({"SM_CURRENT_HOST": None}, RuntimeError, "SM_CURRENT_HOST"),
        ({"SM_HOSTS": "algo-1"}, ValueError, "SM_HOSTS to be a JSON list"),
        ({"SM_HOSTS": "[1]"}, ValueError, "SM_HOSTS to be a JSON list"),
        ({"SM_HOSTS": '"algo-2"'}, ValueError, "SM_HOSTS to be a JSON list"),
        ({"SM_CURRENT_HOST": "algo-3"}, ValueError, "one of SM_HOSTS.*'algo-3'"),
    ],
)
def test_sagemaker_refuses_bad_variables(env, wrong, error, words):
    env(SAGEMAKER, **wrong)
    with pytest.raises(error, match=words):
        SageMakerClusterResolver().cluster_spec()


@given(
    st.dictionaries(
        st.sampled_from([*TORCHRUN, "LOCAL_WORLD_SIZE", *OPEN_MPI, *SAGEMAKER]),
        st.sampled_from(["0", "1", "2", "65535", "node1", "-1", "", "[]", '["node1"]']),
    )
)
@settings(deadline=None, max_examples=200)
def test_any_variables_give_a_task_or_a_named_error(variables):
    names = [*TORCHRUN, "LOCAL_WORLD_SIZE", *OPEN_MPI, *SAGEMAKER, "PMI_RANK", "port"]
    for make in (TorchrunClusterResolver, MPIClusterResolver, SageMakerClusterResolver):
        with mock.patch.dict(os.environ, variables):
            try:
                resolver = make()
                spec, task_id = resolver.cluster_spec(), resolver.task_id
            except (ValueError, RuntimeError) as error:
                assert any(name in str(error) for name in names), error
                assert "Received" in str(error)
            else:
                assert task_id in spec.task_indices("worker")


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
def test_sagemaker_matches_tensorflow(env):
    from tensorflow.python.distribute.cluster_resolver import (
        sagemaker_cluster_resolver as native,
    )

    env(SAGEMAKER)
    for arguments in ({}, {"port": 7, "rpc_layer": "grpc", "task_id": 0}):
        ours = SageMakerClusterResolver(**arguments)
        theirs = native.SageMakerClusterResolver(**arguments)
        assert ours.cluster_spec().as_dict() == theirs.cluster_spec().as_dict()
        assert ours.master() == theirs.master()
        for name in ("task_type", "task_id", "rpc_layer", "environment"):
            assert getattr(ours, name) == getattr(theirs, name), name
