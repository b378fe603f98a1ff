"""Evidence that each kind of cluster leaves in a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from keras_strategy.cluster_resolver.checks import as_int
from keras_strategy.cluster_resolver.google import tpu_locate
from keras_strategy.cluster_resolver.mpi import MPI_LAUNCHERS
from keras_strategy.cluster_resolver.sagemaker import SM_CURRENT_HOST, SM_HOSTS
from keras_strategy.cluster_resolver.tf_config import TF_CONFIG
from keras_strategy.cluster_resolver.torchrun import TORCHRUN_VARIABLES

_ROOT = Path("/")


class Evidence(NamedTuple):
    """Result of a check: whether a kind of cluster was found, and why."""

    found: bool
    reason: str


def find_tf_config() -> Evidence:
    """Check TF_CONFIG, which may have no cluster."""
    text = os.environ.get(TF_CONFIG)
    if not text:
        return Evidence(False, f"{TF_CONFIG} is not set")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        # It is meant for this program: the resolver reports the error in it.
        return Evidence(True, f"{TF_CONFIG} is set (but is not JSON)")
    if isinstance(config, dict) and not config.get("cluster"):
        return Evidence(False, f'{TF_CONFIG} is set, but has no "cluster"')
    return Evidence(True, f"{TF_CONFIG} is set")


def find_torchrun() -> Evidence:
    """Check the variables of torchrun, which other launchers set as well."""
    return _all_set(TORCHRUN_VARIABLES)


def find_mpi() -> Evidence:
    """Check the variables of MPI launchers."""
    for launcher in MPI_LAUNCHERS:
        if not launcher.is_present:
            continue
        # srun sets PMI variables as well. Slurm's own also have the hosts.
        if (
            os.environ[launcher.rank] == os.environ.get("SLURM_PROCID")
            and os.environ[launcher.size] == os.environ.get("SLURM_STEP_NUM_TASKS")
            and launcher.rank == "PMI_RANK"
        ):
            return Evidence(False, "PMI_RANK and PMI_SIZE are those of Slurm's srun")
        return Evidence(True, f"{launcher.rank} and {launcher.size} are set")
    names = " and ".join(launcher.rank for launcher in MPI_LAUNCHERS)
    return Evidence(False, f"{names} are not set")


def find_sagemaker() -> Evidence:
    """Check the variables of a SageMaker training job."""
    return _all_set((SM_HOSTS, SM_CURRENT_HOST))


def find_slurm() -> Evidence:
    """Check the variables of a Slurm job step of several tasks."""
    found = _all_set(
        (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        )
    )
    if not found.found:
        if os.environ.get("SLURM_JOB_ID"):
            return Evidence(False, "a Slurm job, but not a step: start with srun")
        return found
    # `srun --pty bash` is a step too, but a shell on one node.
    if os.environ["SLURM_STEP_NUM_TASKS"] == "1":
        return Evidence(False, "a Slurm step of one task only")
    return found


def find_tpu() -> Evidence:
    """Check the variables that name a TPU, and the devices of a TPU VM."""
    for name in (
        tpu_locate.GKE_ENDPOINTS,
        tpu_locate.TPU_NAME,
        tpu_locate.TPU_CONFIG,
        tpu_locate.TPU_WORKER_HOSTNAMES,
    ):
        if os.environ.get(name):
            return Evidence(True, f"{name} is set")
    for device in ("dev/accel0", "dev/vfio/0"):
        # Elsewhere /dev/vfio/0 may be a GPU that is passed through.
        if (_ROOT / device).exists() and _on_compute_engine():
            return Evidence(True, f"/{device} exists on a Google Cloud machine")
    return Evidence(
        False, f"{tpu_locate.TPU_NAME} is not set, and this is not a TPU VM"
    )


def find_kubernetes() -> Evidence:
    """Check for a pod of an Indexed Job, the only kind with an index."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return Evidence(False, "KUBERNETES_SERVICE_HOST is not set")
    if not os.environ.get("JOB_COMPLETION_INDEX"):
        return Evidence(
            False,
            "a pod, but not of an Indexed Job (JOB_COMPLETION_INDEX is not set): make "
            "a KubernetesClusterResolver yourself",
        )
    try:
        job, index = indexed_job()
    except ValueError as error:
        return Evidence(False, str(error))
    return Evidence(True, f"this is pod {index} of the Indexed Job {job}")


def indexed_job() -> tuple[str, int]:
    """Return the name of this pod's Indexed Job and its index, or raise ValueError."""
    index = as_int(os.environ.get("JOB_COMPLETION_INDEX", ""), "JOB_COMPLETION_INDEX")
    hostname = os.environ.get("HOSTNAME", "")
    # The host name consists of the job's name and the index.
    job = hostname.removesuffix(f"-{index}")
    if not job or job == hostname:
        raise ValueError(
            f"Expected HOSTNAME to end in -{index}, as in pod {index} of an Indexed "
            f"Job. Received: {hostname!r}"
        )
    return job, index


def _all_set(names: tuple[str, ...]) -> Evidence:
    missing = [name for name in names if not os.environ.get(name)]
    if not missing:
        return Evidence(True, f"{', '.join(names)} are set")
    verb = "is" if len(missing) == 1 else "are"
    return Evidence(False, f"{', '.join(missing)} {verb} not set")


def _on_compute_engine() -> bool:
    try:
        product = (_ROOT / "sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False
    return product.strip() == "Google Compute Engine"
