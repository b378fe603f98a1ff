"""Resolvers for the variables of TF_CONFIG, torchrun, MPI launchers and SageMaker."""

import abc
import json
import os
import socket
import struct
from typing import Any, NamedTuple

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.cluster_spec import (
    DEFAULT_PORT,
    ClusterSpec,
    as_int,
    join_host_port,
    port_number,
    split_host_port,
    task_index,
)

TF_CONFIG = "TF_CONFIG"


class ClusterDescription(NamedTuple):
    """Content of the environment: the cluster, and this process's task in it."""

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


class EnvironmentClusterResolver(ClusterResolver):
    """Resolver that reads the environment on every call; arguments override it."""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    @abc.abstractmethod
    def _describe(self) -> ClusterDescription:
        """Read the environment."""

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the environment; an empty one where it has none."""
        return self._describe().cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task; empty where this process is the only one.

        Raises:
            RuntimeError: If neither an argument nor the environment gives a task.
            ValueError: If the cluster has no such task.
        """
        description = self._describe()
        if description.session_master is not None:
            return description.session_master
        spec = description.cluster
        if not spec or (len(spec.jobs) == 1 and spec.num_tasks(spec.jobs[0]) == 1):
            return ""
        task_type = task_type if task_type is not None else self.task_type
        task_id = task_id if task_id is not None else self.task_id
        if task_type is None or task_id is None:
            # Launchers always give a task.
            raise RuntimeError(
                'Expected `task_type` and `task_id` as arguments or in "task" of the '
                f"environment variable {TF_CONFIG}. Received: task_type={task_type!r}, "
                f"task_id={task_id!r}"
            )
        rpc_layer = rpc_layer if rpc_layer is not None else self.rpc_layer
        return format_master_url(spec.task_address(task_type, task_id), rpc_layer)

    def _look_up(self, name: str) -> Any:
        return getattr(self._describe(), name)


class TFConfigClusterResolver(EnvironmentClusterResolver):
    """Cluster of the environment variable TF_CONFIG.

    TF_CONFIG is a JSON object. Its `"cluster"` maps job names to the addresses
    of their tasks; its `"task"` has the `"type"` and `"index"` of this process.
    The variable is read again on every call.

    Args:
        task_type: Overrides the task's type.
        task_id: Overrides the task's index.
        rpc_layer: Overrides the `"rpc_layer"`.
        environment: The value of the property `environment`.

    Example:
    ```python
    import json
    import os

    from keras_strategy.cluster_resolver import TFConfigClusterResolver

    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
        "task": {"type": "worker", "index": 1},
    })
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    del os.environ["TF_CONFIG"]
    ```
    """

    def _describe(self) -> ClusterDescription:
        config = _check_object(_load_tf_config(), "")
        jobs = _check_object(config.get("cluster", {}), "cluster")
        try:
            cluster = ClusterSpec(jobs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{TF_CONFIG}: {error}") from None
        for job in cluster.jobs:
            for index in cluster.task_indices(job):
                if not cluster.task_address(job, index):
                    place = f"cluster.{job}[{index}]"
                    raise _invalid(place, 'an address "host:port"', "")
        task = _check_object(config.get("task", {}), "task")
        task_type = _get_text(task, "type", "task.type")
        task_id = None
        if "index" in task:
            task_id = task_index(task["index"], f"{TF_CONFIG}: task.index")
        if task_type in cluster.jobs and task_id is not None:
            indices = cluster.task_indices(task_type)
            if task_id not in indices:
                expected = f"one of cluster.{task_type}'s indices {indices}"
                raise _invalid("task.index", expected, task_id)
        rpc_layer = _get_text(config, "rpc_layer", "rpc_layer")
        session_master = _get_text(config, "session_master", "session_master")
        return ClusterDescription(
            cluster, task_type, task_id, rpc_layer, session_master
        )


def _load_tf_config() -> Any:
    text = os.environ.get(TF_CONFIG) or "{}"
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(
            f"Expected the environment variable {TF_CONFIG} to be JSON of a cluster. "
            "Received: JSON nested too deeply"
        ) from None
    except ValueError as error:
        # A JSONDecodeError, or the refusal of a number with thousands of digits.
        raise ValueError(
            f"Expected the environment variable {TF_CONFIG} to be valid JSON. "
            f"Received: {text[:200]} ({error})"
        ) from None


def _check_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(place, "an object", value)
    return value


def _get_text(parent: dict[str, Any], key: str, place: str) -> str | None:
    value = parent.get(key)
    # An explicit null counts as absent, except for the task's type, which would
    # silently be the type "None" in TensorFlow.
    if value is None and not (key in parent and key == "type"):
        return None
    if not isinstance(value, str):
        raise _invalid(place, "a string", value)
    return value


def _invalid(place: str, expected: str, value: Any) -> ValueError:
    where = f"{TF_CONFIG}: {place}" if place else TF_CONFIG
    return ValueError(
        f"Expected {where} to be {expected}. Received: {repr(value)[:200]}"
    )


def _require(name: str, launcher: str) -> str:
    """Return an environment variable that `launcher` always sets."""
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(
            f"Expected the environment variable {name} to be set, as {launcher} does. "
            f"Received: {value!r}"
        )
    return value


def _get_int(name: str, minimum: int = 0) -> int | None:
    value = os.environ.get(name)
    return as_int(value, name, minimum) if value else None


def _read_rank(rank_name: str, size_name: str, launcher: str) -> tuple[int, int]:
    size = as_int(_require(size_name, launcher), size_name, minimum=1)
    rank = as_int(_require(rank_name, launcher), rank_name)
    if rank >= size:
        raise ValueError(
            f"Expected {rank_name} to be less than {size_name} ({size}). Received: "
            f"{rank}"
        )
    return rank, size


def _place_workers(size: int, num_on_host: int, host: str, port: int) -> ClusterSpec:
    """Return a cluster of `size` workers, the first `num_on_host` of them on `host`."""
    # The launchers report only rank 0's host. All workers must get the same spec, so
    # the other addresses stay empty instead of being guessed.
    addresses = [
        join_host_port(host, port_number(port + rank, "port"))
        if rank < num_on_host
        else ""
        for rank in range(size)
    ]
    return ClusterSpec({"worker": addresses})


class TorchrunClusterResolver(EnvironmentClusterResolver):
    """Cluster of the variables that torchrun sets.

    These are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and optionally
    LOCAL_RANK and LOCAL_WORLD_SIZE; other launchers set them too. Every process
    is a worker, and its rank is its index.

    torchrun reports only the host of rank 0. The workers on that host get
    consecutive ports; the addresses of all others are empty strings.

    Args:
        port: The port of rank 0. Defaults to MASTER_PORT, or to the one after
            it where torchrun's own store listens on MASTER_PORT
            (TORCHELASTIC_USE_AGENT_STORE is "True").
        rpc_layer: The protocol between workers.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import TorchrunClusterResolver

    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1",
                      MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    resolver = TorchrunClusterResolver()
    assert resolver.task_id == 1
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.1:29500", ""]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ```
    """

    def __init__(self, port: int | None = None, rpc_layer: str | None = None) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._port = None if port is None else port_number(port, "`port`")

    @property
    def local_rank(self) -> int | None:
        """The index of this process on its host; `None` where it is not known."""
        return _get_int("LOCAL_RANK")

    def _describe(self) -> ClusterDescription:
        rank, size = _read_rank("RANK", "WORLD_SIZE", "torchrun")
        host = _require("MASTER_ADDR", "torchrun")
        port = self._port
        if port is None:
            port = port_number(_require("MASTER_PORT", "torchrun"), "MASTER_PORT")
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                port += 1
        # torchrun starts the same number on every host.
        local_size = _get_int("LOCAL_WORLD_SIZE", minimum=1) or 1
        spec = _place_workers(size, local_size, host, port)
        return ClusterDescription(spec, "worker", rank)


class MPILauncher(NamedTuple):
    """Variables of one family of MPI launchers."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def is_present(self) -> bool:
        """True if this family's launcher started this process."""
        return bool(os.environ.get(self.rank) and os.environ.get(self.size))


MPI_LAUNCHERS = (
    MPILauncher(
        "Open MPI's mpirun",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # MPICH, Intel MPI, MVAPICH: all that use Hydra.
    MPILauncher(
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
)


class MPIClusterResolver(EnvironmentClusterResolver):
    """Cluster of the variables of Open MPI, MPICH or Intel MPI.

    These are OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, or PMI_RANK and PMI_SIZE.
    Every process is a worker, and its rank is its index. MPI itself is not used.

    No launcher reports the host of rank 0. It is `coordinator_address`, or else
    MASTER_ADDR, or else this host where all processes are on one. The addresses
    of workers on other hosts are empty strings.

    Args:
        coordinator_address: The host (or `"host:port"`) of rank 0, the same on
            all workers.
        port_base: The port of rank 0 where `coordinator_address` has none.
            Defaults to MASTER_PORT, or else to 8888.
        rpc_layer: The protocol between workers.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import MPIClusterResolver

    os.environ.update(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4")
    resolver = MPIClusterResolver(coordinator_address="node1:2222")
    assert resolver.task_id == 3
    assert resolver.cluster_spec().task_address("worker", 0) == "node1:2222"
    del os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    ```
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        port_base: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._coordinator_address = coordinator_address
        self._port_base = None if port_base is None else port_number(port_base, "port")

    @property
    def local_rank(self) -> int | None:
        """The index of this process on its host; `None` where it is not known."""
        return _get_int(_find_launcher().local_rank)

    @property
    def job_identity(self) -> str:
        """The job's name in Open MPI; with MPICH on one host, its Hydra process.

        MPICH's launcher does not name its jobs. On several hosts the text is empty.
        """
        # Open MPI and Cray's launcher name their jobs.
        name = os.environ.get("PMIX_NAMESPACE") or os.environ.get("PMI_JOBID", "")
        if name or os.environ.get("MPI_LOCALNRANKS") != os.environ.get("PMI_SIZE"):
            return name
        pid = _find_hydra_proxy()
        return f"hydra {pid}" if pid else ""

    def _describe(self) -> ClusterDescription:
        launcher = _find_launcher()
        rank, size = _read_rank(launcher.rank, launcher.size, launcher.name)
        # The number of workers on rank 0's host is known only if all are there.
        is_one_host = (_get_int(launcher.local_size, minimum=1) or 1) == size
        port = self._port_base
        if port is None:
            port = port_number(
                os.environ.get("MASTER_PORT") or DEFAULT_PORT, "MASTER_PORT"
            )
        host = self._coordinator_address or os.environ.get("MASTER_ADDR")
        if host:
            host, text = split_host_port(host)
            if text is not None:
                port = port_number(text, "the port of `coordinator_address`")
        elif is_one_host:
            host = "127.0.0.1"
        else:
            raise RuntimeError(
                f"{launcher.name} does not report the host of rank 0. Expected "
                "the environment variable MASTER_ADDR on all workers (`mpirun -x "
                "MASTER_ADDR=host ...` or `mpiexec -genv MASTER_ADDR host ...`), or "
                "the argument `coordinator_address`. Received: neither"
            )
        spec = _place_workers(size, size if is_one_host else 1, host, port)
        return ClusterDescription(spec, "worker", rank)


def _find_hydra_proxy() -> int:
    """Return the pid of the Hydra process that started this worker, or 0."""
    # It need not be the parent process: a shell may be in between. It created the pair
    # of sockets PMI_FD. If a program in between has closed this, the number may belong
    # to a file of this process.
    try:
        with socket.socket(fileno=os.dup(int(os.environ["PMI_FD"]))) as pmi:
            size = struct.calcsize("3i")
            found = pmi.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    except (AttributeError, KeyError, OSError, ValueError):  # SO_PEERCRED is Linux's
        return 0
    pid = struct.unpack("3i", found)[0]
    return 0 if pid == os.getpid() else pid


def _find_launcher() -> MPILauncher:
    for launcher in MPI_LAUNCHERS:
        if launcher.is_present:
            return launcher
    names = " or ".join(f"{f.rank} and {f.size}" for f in MPI_LAUNCHERS)
    raise RuntimeError(
        f"Expected the environment variables {names} to be set, as mpirun and "
        "mpiexec do. Received: neither"
    )


class SageMakerClusterResolver(EnvironmentClusterResolver):
    """Cluster of SageMaker's SM_HOSTS and SM_CURRENT_HOST.

    Every host of the job is a worker; they are sorted by name.

    Args:
        port: The port that every worker listens on.
        task_type: Overrides the task type.
        task_id: Overrides the task id.
        rpc_layer: The protocol between workers.
        environment: The value of the property `environment`.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import SageMakerClusterResolver

    os.environ["SM_HOSTS"] = '["algo-1", "algo-2"]'
    os.environ["SM_CURRENT_HOST"] = "algo-2"
    resolver = SageMakerClusterResolver(port=2223)
    assert resolver.cluster_spec().task_address("worker", 0) == "algo-1:2223"
    assert resolver.task_id == 1
    del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    ```
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port_number(port, "`port`")

    def _describe(self) -> ClusterDescription:
        text = _require("SM_HOSTS", "a SageMaker training job")
        current = _require("SM_CURRENT_HOST", "a SageMaker training job")
        try:
            hosts = json.loads(text)
        except (ValueError, RecursionError):
            hosts = None
        if not isinstance(hosts, list) or not all(
            isinstance(host, str) and host for host in hosts
        ):
            raise ValueError(
                "Expected the environment variable SM_HOSTS to be a JSON list of "
                f"host names. Received: {text[:200]!r}"
            )
        hosts = sorted(hosts)
        if current not in hosts:
            # TensorFlow returns an empty cluster here, so that every host trains
            # alone and nobody notices.
            raise ValueError(
                f"Expected SM_CURRENT_HOST to be one of SM_HOSTS ({hosts}). "
                f"Received: {current!r}"
            )
        addresses = [join_host_port(host, self._port) for host in hosts]
        spec = ClusterSpec({"worker": addresses})
        return ClusterDescription(spec, "worker", hosts.index(current))
