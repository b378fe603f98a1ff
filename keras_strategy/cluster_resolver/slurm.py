"""`SlurmClusterResolver`: the tasks of a Slurm job step, and each task's GPUs."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_strategy.cluster_resolver.base import ClusterResolver, import_extra
from keras_strategy.cluster_resolver.cluster_spec import (
    DEFAULT_PORT,
    ClusterSpec,
    as_int,
    join_host_port,
    port_number,
)
from keras_strategy.errors import logger

_REPEATED = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,5})\))?", re.ASCII)
_MAX_NODES = 100_000
_CUDA = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 10


def _get_step_variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(
            f"{name} not found in environment. Not running inside a Slurm step? "
            "Start the program with `srun`, also inside `sbatch` and `salloc`. "
            f"Received: {value!r}"
        )
    return value


def _get_step_integer(name: str) -> int:
    return as_int(_get_step_variable(name), name)


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of an expression such as "n[1-2],m5,o[03-04,6]", in order."""
    library = import_extra("hostlist", "slurm", "SlurmClusterResolver")
    try:
        # Keep duplicates: without one, the following ranks would shift.
        result = library.expand_hostlist(hostlist, allow_duplicates=True)
        if len(set(result)) != len(result):
            raise ValueError("it must have every node once")
    except (library.BadHostlist, RecursionError, ValueError) as error:
        raise ValueError(
            "Expected the environment variable SLURM_STEP_NODELIST to be a host list "
            f'like "node[1-3,07],login". Received: {hostlist[:200]!r} ({error})'
        ) from None
    return result


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the numbers of an expression such as "3(x2),2,1"."""
    result: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or len(result) > _MAX_NODES:
            raise ValueError(
                "Expected the environment variable SLURM_STEP_TASKS_PER_NODE to be "
                f'like "2(x3),1". Received: {text[:200]!r}'
            )
        result.extend([int(match[1])] * int(match[2] or 1))
    return result


# Earlier values of CUDA_VISIBLE_DEVICES, by the values that replaced them: a second
# resolver in the process must divide the node's GPUs, not those of the first one.
_previous_devices: dict[str, Sequence[str]] = {}


class _Gpus(NamedTuple):
    """GPUs of one task."""

    per_task: int
    # Those that the tasks of this node divide among them.
    node: Sequence[str] = ()
    # Those of this task; None leaves CUDA_VISIBLE_DEVICES as it is.
    task: Sequence[str] | None = None


def _assign_gpus(
    per_node: int | None, per_task: int | None, num_tasks: int, local_rank: int
) -> _Gpus:
    """Divide a node's GPUs, by default all, among its tasks, by default equally."""
    value = os.environ.get(_CUDA)
    visible: Sequence[str] | None = None
    if value is not None:
        listed = [gpu.strip() for gpu in value.split(",") if gpu.strip()]
        visible = _previous_devices.get(value, listed)
    if per_node is None and per_task is None and _is_bound_by_slurm():
        return _Gpus(len(visible or []))
    if per_node is None:
        per_node = _count_installed_gpus() if visible is None else len(visible)
    if per_task is None:
        per_task = per_node // num_tasks
        if not per_task:
            if per_node:
                logger.warning(
                    "%d tasks on one node see %d GPU(s), too few to divide; %s is "
                    "left as it is. Pass gpus_per_task, or start fewer tasks per node.",
                    num_tasks,
                    per_node,
                    _CUDA,
                )
            return _Gpus(0)
    if num_tasks * per_task > per_node:
        raise RuntimeError(
            f"Requested more GPUs per node than available. Expected at most {per_node} "
            f"for {num_tasks} tasks of a node. Received: gpus_per_task={per_task}"
        )
    if not per_node:
        return _Gpus(0)
    # Slurm may have granted this job GPUs 2 and 3.
    if visible is None or len(visible) != per_node:
        visible = [str(index) for index in range(per_node)]
    first = local_rank * per_task
    return _Gpus(per_task, visible, visible[first : first + per_task])


def _count_installed_gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 if it fails."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_NVIDIA_SMI_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in output.splitlines())


def _is_bound_by_slurm() -> bool:
    """Return True if Slurm itself shows each task only its own GPUs."""
    bind = os.environ.get("SLURM_GPU_BIND")
    if bind:
        return "none" not in bind
    # --gpus-per-task binds, except with --gpu-bind=none.
    return bool(os.environ.get("SLURM_GPUS_PER_TASK")) or (
        "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    )


class SlurmClusterResolver(ClusterResolver):
    """Cluster of the variables of a Slurm job step (`srun`).

    SLURM_PROCID is this task's rank. SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST
    and SLURM_STEP_TASKS_PER_NODE provide what the arguments do not. Ranks follow
    the order of the node list; tasks on one node get consecutive ports. Needs the
    extra `slurm`, unless `tasks_per_node` is a dict.

    The GPUs of a node are divided equally among its tasks. Where Slurm itself assigns
    GPUs to each task (`--gpus-per-task`, `--gpu-bind`), they stay as they are.

    Args:
        jobs: A dict from job name to its number of tasks. The ranks are assigned to the
            jobs in the order of their names, so `{"ps": 1, "worker": 4}` makes rank 0
            the parameter server. Defaults to all tasks being "worker".
        port_base: The port of the first task of each node.
        gpus_per_node: The number of GPUs of each node. Defaults to those this
            task can see (CUDA_VISIBLE_DEVICES, else nvidia-smi; none without).
        gpus_per_task: The number of GPUs of each task. Defaults to an equal part
            of `gpus_per_node`.
        tasks_per_node: The number of tasks on each node: an integer, or a dict
            from host name to number, in the order of the ranks.
        auto_set_gpu: Whether `cluster_spec()` sets CUDA_VISIBLE_DEVICES to this
            task's GPUs. Call it before the first GPU is used.
        rpc_layer: The protocol between tasks.

    Raises:
        RuntimeError: If a variable is missing (then this is not a job step),
            more GPUs or tasks are requested than there are, or the ranks do not
            follow the node list.
        ValueError: If a variable cannot be parsed.
        ImportError: If the extra `slurm` is not installed.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import SlurmClusterResolver

    os.environ["SLURM_PROCID"] = "2"  # set by srun
    resolver = SlurmClusterResolver(
        jobs={"ps": 1, "worker": 3}, tasks_per_node={"node1": 2, "node2": 2},
        gpus_per_node=0)
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.cluster_spec().task_address("worker", 1) == "node2:8888"
    del os.environ["SLURM_PROCID"]
    ```
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = DEFAULT_PORT,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = _get_step_integer("SLURM_PROCID")
        if jobs is None:
            jobs = {"worker": _get_step_integer("SLURM_STEP_NUM_TASKS")}
        self._port_base = port_number(port_base, "`port_base`")
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        nodes = _count_tasks(tasks_per_node)
        # The host of every rank, and its number on that host.
        self._placement = [(host, n) for host in nodes for n in range(nodes[host])]

        num_tasks = len(self._placement)
        if sum(jobs.values()) != num_tasks:
            raise RuntimeError(
                f"Expected `jobs` to have the step's {num_tasks} tasks. "
                f"Received: {sum(jobs.values())} tasks in {dict(jobs)}"
            )
        if not 0 <= self._rank < num_tasks:
            raise RuntimeError(
                f"Expected SLURM_PROCID to be less than the step's {num_tasks} tasks. "
                f"Received: {self._rank}"
            )
        self._jobs: dict[str, range] = {}
        first = 0
        # Sorted by name, as in tf.distribute.
        for job_name, count in sorted(jobs.items()):
            self._jobs[job_name] = range(first, first + count)
            if self._rank in self._jobs[job_name]:
                self._task_type, self._task_id = job_name, self._rank - first
            first += count
        _, local_rank = self._placement[self._rank]
        # With `srun --distribution=cyclic` every address would be another task's.
        text = os.environ.get("SLURM_LOCALID")
        found = as_int(text, "SLURM_LOCALID") if text else local_rank
        if found != local_rank:
            raise RuntimeError(
                f"Expected task {self._rank} to be number {local_rank} on its node, by "
                f"the numbers of tasks per node. Received: SLURM_LOCALID={found}. "
                "Start with `srun --distribution=block`, or correct `tasks_per_node`"
            )
        self._gpus = _assign_gpus(
            gpus_per_node, gpus_per_task, max(nodes.values()), local_rank
        )

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster; set CUDA_VISIBLE_DEVICES if `auto_set_gpu` is true."""
        addresses = [join_host_port(h, self._port_base + n) for h, n in self._placement]
        if self._auto_set_gpu and self._gpus.task is not None:
            value = ",".join(self._gpus.task)
            if os.environ.get(_CUDA) != value:
                _previous_devices[value] = self._gpus.node
                os.environ[_CUDA] = value
        jobs = {job: addresses[r.start : r.stop] for job, r in self._jobs.items()}
        return ClusterSpec(jobs)

    @property
    def job_identity(self) -> str:
        """The ids of the Slurm job and of its step."""
        ids = (os.environ.get(f"SLURM_{kind}_ID", "") for kind in ("JOB", "STEP"))
        return "slurm " + ".".join(ids)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the task type and the task id of this process, as `("worker", 1)`."""
        return self.task_type, self.task_id

    def _count_accelerators(self) -> dict[str, int]:
        return {"GPU": self._gpus.per_task}


def _count_tasks(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return how many tasks each node runs, in the order of the ranks."""
    if isinstance(tasks_per_node, Mapping):
        nodes = dict(tasks_per_node)
    else:
        hosts = expand_hostlist(_get_step_variable("SLURM_STEP_NODELIST"))
        if tasks_per_node is None:
            counts = expand_tasks_per_node(
                _get_step_variable("SLURM_STEP_TASKS_PER_NODE")
            )
        else:
            counts = [int(tasks_per_node)] * len(hosts)
        if len(counts) != len(hosts):
            raise ValueError(
                "Expected SLURM_STEP_TASKS_PER_NODE to have one number for each of "
                f"the {len(hosts)} nodes of SLURM_STEP_NODELIST. Received: {counts}"
            )
        nodes = dict(zip(hosts, counts, strict=True))
    if not nodes or min(nodes.values()) < 1:
        raise ValueError(
            f"Expected `tasks_per_node` of at least 1 on every node. Received: {nodes}"
        )
    return nodes
