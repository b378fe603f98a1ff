"""`SlurmClusterResolver`: the tasks of a Slurm job step."""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_strategy.cluster_resolver import slurm_environment, slurm_gpus
from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.checks import join_host_port, port_number
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


class SlurmClusterResolver(ClusterResolver):
    """Cluster of the variables of a Slurm job step (`srun`).

    SLURM_PROCID is this task's rank. SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST
    and SLURM_STEP_TASKS_PER_NODE provide what the arguments do not. Ranks follow
    the order of the node list; tasks on one node get consecutive ports. Needs the
    extra `slurm`, unless `tasks_per_node` is a dict.

    The GPUs of a node are divided equally among its tasks. Where Slurm itself
    assigns GPUs to each task (`--gpus-per-task`, `--gpu-bind`), they stay as they
    are.

    Args:
        jobs: A dict from job name to its number of tasks. The ranks are assigned
            to the jobs in the order of their names, so `{"ps": 1, "worker": 4}`
            makes rank 0 the parameter server. Defaults to all tasks being
            "worker".
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
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = slurm_environment.step_integer("SLURM_PROCID")
        if jobs is None:
            jobs = {"worker": slurm_environment.step_integer("SLURM_STEP_NUM_TASKS")}
        self._port_base = port_number(port_base, "`port_base`")
        self._nodes = _count_tasks(tasks_per_node)
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer

        num_tasks = sum(self._nodes.values())
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
        self._jobs = _assign_ranks(jobs)
        for job_name, ranks in self._jobs.items():
            if self._rank in ranks:
                self._task_type = job_name
                self._task_id = ranks.index(self._rank)
        self._check_distribution()
        _, local_rank = self._placement()[self._rank]
        self._gpus = slurm_gpus.assign_gpus(
            gpus_per_node, gpus_per_task, max(self._nodes.values()), local_rank
        )

    def _check_distribution(self) -> None:
        """Check that the ranks follow the node list.

        With `srun --distribution=cyclic` every address would be another task's.
        """
        if not os.environ.get("SLURM_LOCALID"):
            return
        found = slurm_environment.step_integer("SLURM_LOCALID")
        _, expected = self._placement()[self._rank]
        if found != expected:
            raise RuntimeError(
                f"Expected task {self._rank} to be number {expected} on its node, by "
                "the numbers of tasks per node. Received: SLURM_LOCALID="
                f"{found}. Start with `srun --distribution=block`, or correct "
                "`tasks_per_node`"
            )

    def _placement(self) -> list[tuple[str, int]]:
        """Return the host of every rank, and its number on that host."""
        return [
            (host, local_rank)
            for host, num_tasks in self._nodes.items()
            for local_rank in range(num_tasks)
        ]

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster, and assign this task its GPUs.

        Sets CUDA_VISIBLE_DEVICES if `auto_set_gpu` is true and there are GPUs to
        divide.
        """
        addresses = [
            join_host_port(host, self._port_base + local_rank)
            for host, local_rank in self._placement()
        ]
        if self._auto_set_gpu:
            self._gpus.apply()
        return ClusterSpec(
            {
                job_name: [addresses[rank] for rank in ranks]
                for job_name, ranks in self._jobs.items()
            }
        )

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
        hosts = slurm_environment.step_hosts()
        if tasks_per_node is None:
            counts = slurm_environment.step_tasks_per_node()
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


def _assign_ranks(jobs: Mapping[str, int]) -> dict[str, range]:
    """Return the ranks of each job, sorted by name as in tf.distribute."""
    ranks_of: dict[str, range] = {}
    first = 0
    for job_name, num_tasks in sorted(jobs.items()):
        ranks_of[job_name] = range(first, first + num_tasks)
        first += num_tasks
    return ranks_of
