"""`ClusterSpec`: the tasks of a cluster, their addresses and their roles.

The chief, or else worker 0, writes checkpoints and logs and has rank 0. Parameter
servers ("ps") and the "evaluator" have no rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

# The port of the chief where neither the user nor the cluster chooses one.
DEFAULT_PORT = 8888


def as_int(value: str, name: str, minimum: int = 0) -> int:
    """Return the integer that a text contains; `name` is for the error."""
    # Only ASCII digits, and few: int() accepts other alphabets' digits and has its own
    # error for very long texts.
    if not (value.isascii() and value.isdecimal() and len(value) < 10) or (
        int(value) < minimum
    ):
        raise ValueError(
            f"Expected {name} to be an integer >= {minimum}. Received: {value!r}"
        )
    return int(value)


def port_number(value: str | int, name: str) -> int:
    """Return a TCP port from 1 to 65535; `name` is for the error."""
    port = as_int(str(value), name, minimum=1)
    if port > 65535:
        raise ValueError(f"Expected {name} to be a port up to 65535. Received: {port}")
    return port


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with the brackets that an IPv6 address needs."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, str | None]:
    """Return the host without brackets, and the text of the port, if there is one."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    # Several colons without brackets are an IPv6 host.
    host, colon, port = address.partition(":")
    return (host, port if colon else None) if ":" not in port else (address, None)


class ClusterSpec:
    """The tasks of a cluster, grouped into jobs.

    A task is one process, a job a named group of tasks ("chief", "worker",
    "ps", "evaluator"). An address comes from the cluster manager and usually is
    `"host:port"`. It is the empty string where the manager reports how many tasks
    there are, but not their addresses (see `TorchrunClusterResolver`).

    Args:
        cluster: A mapping from job names to the addresses of their tasks: a
            list, or a mapping from task index to address where only some tasks
            are known. Also another `ClusterSpec`, a `tf.train.ClusterDef`, or any
            object whose `as_dict()` returns such a mapping, as
            `tf.train.ClusterSpec` does.

    Raises:
        TypeError: If `cluster` is none of these, or a job name or an address
            is not a string.
        ValueError: If a task index is not a non-negative integer, or is given
            twice. The methods raise it for a job or a task that does not exist.

    Example:
    ```python
    from keras_strategy.cluster_resolver import ClusterSpec

    spec = ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"],
                        "ps": {1: "10.0.0.9:2222"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_address("ps", 1) == "10.0.0.9:2222"
    ```
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec | Any) -> None:
        if not isinstance(cluster, Mapping) and hasattr(cluster, "as_dict"):
            cluster = cluster.as_dict()
        if (jobs := getattr(cluster, "job", None)) is not None:  # of a ClusterDef
            cluster = {job.name: dict(job.tasks) for job in jobs}
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "Expected `cluster` to be a dict from job names to lists of "
                f"addresses, or a ClusterSpec. Received: {cluster!r} (of type "
                f"{type(cluster).__name__})"
            )
        self._jobs: dict[str, dict[int, str]] = {}
        for job_name, tasks in cluster.items():
            name = _decode(job_name, "every job name in `cluster`")
            self._jobs[name] = _index_tasks(name, tasks)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    # Unhashable, like tf.train.ClusterSpec.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the jobs as a dict that `ClusterSpec` accepts.

        Each job is a list of addresses, or a dict from task index to address where the
        indices have gaps or there are no tasks.
        """
        return {
            name: list(tasks.values())
            if tasks and list(tasks) == list(range(len(tasks)))
            else dict(tasks)
            for name, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> Any:
        """Return the cluster as a `tf.train.ClusterDef`; this needs TensorFlow."""
        train = importlib.import_module("tensorflow").train
        return train.ClusterSpec(self.as_dict()).as_cluster_def()

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were passed."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks in a job; gaps in the indices do not count.

        Args:
            job_name: The name of the job, such as `"worker"`.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, in ascending order.

        Args:
            job_name: For example `"worker"`.

        Raises:
            ValueError: If there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task, as `"host:port"`.

        Args:
            job_name: For example `"worker"`.
            task_index: The index of the task in its job.

        Raises:
            ValueError: If there is no such task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}. Expected "
                f"one of {list(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by task index, with `None` for each gap.

        Args:
            job_name: For example `"worker"`.

        Raises:
            ValueError: If there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(
                f"No such job in cluster: {job_name!r}. Expected one of {self.jobs}."
            )
        return self._jobs[job_name]


def _index_tasks(job_name: str, tasks: Any) -> dict[int, str]:
    """Return the tasks of one job by index, in ascending order."""
    if not isinstance(tasks, list | tuple | Mapping):
        raise TypeError(
            f"Expected the tasks of job {job_name!r} to be a list of addresses or "
            f"a dict from index to address. Received: {tasks!r}"
        )
    items = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    result: dict[int, str] = {}
    for key, address in items:
        index = task_index(key, f"every task index of job {job_name!r}")
        if index in result:
            raise ValueError(
                f"Expected every task index of job {job_name!r} once. Received: "
                f"{index} twice"
            )
        result[index] = _decode(address, f"the address of task {index} of {job_name!r}")
    return dict(sorted(result.items()))


def task_index(value: Any, name: str) -> int:
    """Return a task index from an integer, or from the string that JSON makes of it."""
    if isinstance(value, str):
        return as_int(value, name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"Expected {name} to be an integer >= 0. Received: {value!r}")


def _decode(value: Any, name: str) -> str:
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8")
    if isinstance(value, str):
        return value
    raise TypeError(f"Expected {name} to be a string. Received: {value!r}")


TASK_TYPES = ("chief", "worker", "evaluator", "ps")


def validate_task(spec: ClusterSpec, task_type: str, task_id: int) -> None:
    """Raise ValueError if a cluster cannot be trained on or does not have the task."""
    unknown = [job for job in spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise ValueError(f"Expected jobs among {TASK_TYPES}. Received: {unknown}")
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ValueError(
                f"Expected at most one {job!r} task. Received: {spec.num_tasks(job)}"
            )
    if task_type not in spec.jobs:
        # The evaluator need not be in the cluster whose checkpoints it reads.
        if task_type != "evaluator":
            raise ValueError(
                f"Expected `task_type` to be one of the cluster's jobs {spec.jobs}. "
                f"Received: {task_type!r}"
            )
    elif task_id not in spec.task_indices(task_type):
        raise ValueError(
            f"Expected `task_id` to be one of {spec.task_indices(task_type)} for "
            f"task type {task_type!r}. Received: {task_id!r}"
        )


def training_tasks(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Return the type and index of each task that trains, in the order of ranks."""
    jobs = [job for job in ("chief", "worker") if job in spec.jobs]
    return [(job, index) for job in jobs for index in spec.task_indices(job)]
