"""Which of a node's GPUs are a Slurm task's own."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess

_CUDA = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 10

# What CUDA_VISIBLE_DEVICES was before we narrowed it, by what we made of it: a
# second resolver in the process must share out the node's GPUs again, not the
# first one's share.
_before_narrowing: dict[str, list[str]] = {}

logger = logging.getLogger("keras_strategy")


@dataclasses.dataclass(frozen=True)
class Share:
    """The GPUs of one task.

    Attributes:
        per_task: How many each task gets.
        node: The GPUs that the tasks of this node share out.
        own: Those of them that are this task's; `None` to leave them be.
    """

    per_task: int
    node: list[str] = dataclasses.field(default_factory=list)
    own: list[str] | None = None

    def take(self) -> None:
        """Sets CUDA_VISIBLE_DEVICES to the task's own GPUs."""
        if self.own is None:
            return
        value = ",".join(self.own)
        if os.environ.get(_CUDA) != value:
            _before_narrowing[value] = list(self.node)
            os.environ[_CUDA] = value


def share(
    per_node: int | None, per_task: int | None, num_tasks: int, local_rank: int
) -> Share:
    """Shares out a node's GPUs.

    Args:
        per_node: The number of GPUs of the node; `None` to look.
        per_task: The number of GPUs of a task; `None` for an even share.
        num_tasks: The number of tasks on the node that has most.
        local_rank: The number of this task on its node.

    Returns:
        A `Share`.

    Raises:
        RuntimeError: If more are asked for than there are.
    """
    visible = _visible()
    if per_node is None and per_task is None and _bound_by_slurm():
        return Share(len(visible or []))
    if per_node is None:
        if visible is None:
            visible = _installed()
        per_node = len(visible)
    if per_task is None:
        per_task = per_node // num_tasks
        if not per_task:
            if per_node:
                logger.warning(
                    "%d tasks on one node see %d GPU(s), too few to share out; %s is "
                    "left as it is. Pass gpus_per_task, or start fewer tasks per node.",
                    num_tasks,
                    per_node,
                    _CUDA,
                )
            return Share(0)
    if num_tasks * per_task > per_node:
        raise RuntimeError(
            f"Requested more GPUs per node than available. Expected at most {per_node} "
            f"for {num_tasks} tasks of a node. Received: gpus_per_task={per_task}"
        )
    if not per_node:
        return Share(0)
    # Slurm may have granted this job GPUs 2 and 3.
    if visible is None or len(visible) != per_node:
        visible = [str(index) for index in range(per_node)]
    first = local_rank * per_task
    return Share(per_task, visible, visible[first : first + per_task])


def _visible() -> list[str] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES, or `None` if it is not set."""
    value = os.environ.get(_CUDA)
    if value is None:
        return None
    if value in _before_narrowing:
        return list(_before_narrowing[value])
    return [gpu.strip() for gpu in value.split(",") if gpu.strip()]


def _installed() -> list[str]:
    """The GPUs that nvidia-smi lists; none where it is not there or fails."""
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
    """Whether Slurm itself lets each task see only the GPUs that are its own."""
    bind = os.environ.get("SLURM_GPU_BIND")
    if bind:
        return "none" not in bind
    # --gpus-per-task binds, unless told not to.
    return bool(os.environ.get("SLURM_GPUS_PER_TASK")) or (
        "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    )
