"""Roles of tasks: pure functions of a `ClusterSpec`, a task type and a task id.

The chief writes checkpoints and logs and has rank 0; without one, worker 0 does.
Parameter servers ("ps") have no rank. The "evaluator" stands alone.
"""

from __future__ import annotations

from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec

TASK_TYPES = ("chief", "worker", "evaluator", "ps")


def validate_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Check that a cluster can be trained on, and that the task is in it.

    Args:
        spec: The cluster.
        task_type: The type of the task; `None` checks only the cluster.
        task_id: The index of the task.

    Raises:
        ValueError: If a check fails.
    """
    unknown = [job for job in spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise ValueError(f"Expected jobs among {TASK_TYPES}. Received: {unknown}")
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ValueError(
                f"Expected at most one {job!r} task. Received: {spec.num_tasks(job)}"
            )
    if task_type is None:
        return
    if task_type not in TASK_TYPES:
        raise ValueError(
            f"Expected `task_type` to be one of {TASK_TYPES}. Received: {task_type!r}"
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


def is_chief(spec: ClusterSpec, task_type: str, task_id: int) -> bool:
    """Return True if a task is the one that writes checkpoints and logs."""
    validate_task(spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    return "chief" not in spec.jobs and task_type == "worker" and task_id == 0


def training_addresses(spec: ClusterSpec) -> list[str]:
    """Return the addresses of the tasks that train, in the order of their ranks."""
    return [
        spec.task_address(job, index)
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]


def worker_count(spec: ClusterSpec, task_type: str) -> int:
    """Return how many tasks train together with one of this type.

    Raises:
        ValueError: If tasks of this type do not train, or are not in the cluster.
    """
    validate_task(spec, None, None)
    if task_type == "evaluator":
        return 1
    if task_type not in ("chief", "worker") or task_type not in spec.jobs:
        raise ValueError(
            "Expected `task_type` to be 'chief', 'worker' or 'evaluator', and in the "
            f"cluster's jobs {spec.jobs}. Received: {task_type!r}"
        )
    return len(training_addresses(spec))


def task_rank(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """Return the rank of a task among those that train: the chief's is 0.

    Raises:
        ValueError: If tasks of this type do not train, or are not in the cluster.
    """
    validate_task(spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return 0
    if task_type == "worker":
        chiefs = spec.num_tasks("chief") if "chief" in spec.jobs else 0
        return chiefs + spec.task_indices("worker").index(task_id)
    raise ValueError(f"Expected a task that trains. Received: {task_type!r}")
