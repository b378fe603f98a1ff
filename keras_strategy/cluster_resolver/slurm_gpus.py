"""GPUs of a Slurm task."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess

_CUDA = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 10

# Earlier values of CUDA_VISIBLE_DEVICES, by the values that replaced them: a second
# resolver in the process must divide the node's GPUs, not those of the first one.
_previous_devices: dict[str, list[str]] = {}

logger = logging.getLogger("keras_strategy")


@dataclasses.dataclass(frozen=True)
class GpuAssignment:
    """GPUs of one task.

    Attributes:
        per_task: The number of GPUs of each task.
        node: The GPUs that the tasks of this node divide among them.
        task: This task's GPUs; `None` leaves CUDA_VISIBLE_DEVICES as it is.
    """

    per_task: int
    node: list[str] = dataclasses.field(default_factory=list)
    task: list[str] | None = None

    def apply(self) -> None:
        """Set CUDA_VISIBLE_DEVICES to the task's GPUs."""
        if self.task is None:
            return
        value = ",".join(self.task)
        if os.environ.get(_CUDA) != value:
            _previous_devices[value] = list(self.node)
            os.environ[_CUDA] = value


def assign_gpus(
    per_node: int | None, per_task: int | None, num_tasks: int, local_rank: int
) -> GpuAssignment:
    """Divide a node's GPUs among its tasks.

    Args:
        per_node: The number of GPUs of the node; `None` to detect it.
        per_task: The number of GPUs of a task; `None` for an equal part.
        num_tasks: The number of tasks on the node that has most.
        local_rank: The number of this task on its node.

    Raises:
        RuntimeError: If more GPUs are requested than there are.
    """
    visible = _visible()
    if per_node is None and per_task is None and _bound_by_slurm():
        return GpuAssignment(len(visible or []))
    if per_node is None:
        if visible is None:
            visible = _installed()
        per_node = len(visible)
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
            return GpuAssignment(0)
    if num_tasks * per_task > per_node:
        raise RuntimeError(
            f"Requested more GPUs per node than available. Expected at most {per_node} "
            f"for {num_tasks} tasks of a node. Received: gpus_per_task={per_task}"
        )
    if not per_node:
        return GpuAssignment(0)
    # Slurm may have granted this job GPUs 2 and 3.
    if visible is None or len(visible) != per_node:
        visible = [str(index) for index in range(per_node)]
    first = local_rank * per_task
    return GpuAssignment(per_task, visible, visible[first : first + per_task])


def _visible() -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or `None` if it is not set."""
    value = os.environ.get(_CUDA)
    if value is None:
        return None
    if value in _previous_devices:
        return list(_previous_devices[value])
    return [gpu.strip() for gpu in value.split(",") if gpu.strip()]


def _installed() -> list[str]:
    """Return the GPUs that nvidia-smi lists; none if it fails."""
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
        return []
    lines = [line for line in output.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]


def _bound_by_slurm() -> bool:
    """Return True if Slurm itself shows each task only its own GPUs."""
    bind = os.environ.get("SLURM_GPU_BIND")
    if bind:
        return "none" not in bind
    # --gpus-per-task binds, except with --gpu-bind=none.
    return bool(os.environ.get("SLURM_GPUS_PER_TASK")) or (
        "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    )
