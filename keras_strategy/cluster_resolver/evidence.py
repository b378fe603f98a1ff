"""The traces that each kind of cluster leaves in a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from keras_strategy.cluster_resolver.checks import as_int
from keras_strategy.cluster_resolver.google import tpu_locate
from keras_strategy.cluster_resolver.mpi import FLAVORS
from keras_strategy.cluster_resolver.sagemaker import CURRENT_HOST, HOSTS
from keras_strategy.cluster_resolver.tf_config import VARIABLE as TF_CONFIG
from keras_strategy.cluster_resolver.torchrun import VARIABLES as TORCHRUN

_ROOT = Path("/")


class Evidence(NamedTuple):
    """Whether a kind of cluster is here, and the reason."""

    found: bool
    reason: str


def tf_config() -> Evidence:
    """TF_CONFIG, unless it names no cluster."""
    text = os.environ.get(TF_CONFIG)
    if not text:
        return Evidence(False, f"{TF_CONFIG} is not set")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        # Someone meant it: the resolver says what is wrong with it.
        return Evidence(True, f"{TF_CONFIG} is set (but is not JSON)")
    if isinstance(config, dict) and not config.get("cluster"):
        return Evidence(False, f'{TF_CONFIG} is set, but has no "cluster"')
    return Evidence(True, f"{TF_CONFIG} is set")


def torchrun() -> Evidence:
    """The variables of torchrun, and of those who imitate it."""
    return _all_set(TORCHRUN)


def mpi() -> Evidence:
    """The variables of a launcher of MPI."""
    for flavor in FLAVORS:
        if not flavor.present:
            continue
        # srun speaks PMI as well, and knows the hosts, which PMI does not.
        if (
            os.environ[flavor.rank] == os.environ.get("SLURM_PROCID")
            and os.environ[flavor.size] == os.environ.get("SLURM_STEP_NUM_TASKS")
            and flavor.rank == "PMI_RANK"
        ):
            return Evidence(False, "PMI_RANK and PMI_SIZE are those of Slurm's srun")
        return Evidence(True, f"{flavor.rank} and {flavor.size} are set")
    names = " and ".join(flavor.rank for flavor in FLAVORS)
    return Evidence(False, f"{names} are not set")


def sagemaker() -> Evidence:
    """The variables of a SageMaker training job."""
    return _all_set((HOSTS, CURRENT_HOST))


def slurm() -> Evidence:
    """The variables of a Slurm job step of several tasks."""
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
    # `srun --pty bash` is a step too: a shell on a node, not a cluster.
    if os.environ["SLURM_STEP_NUM_TASKS"] == "1":
        return Evidence(False, "a Slurm step of one task only")
    return found


def tpu() -> Evidence:
    """The variables that name a TPU, or the devices of a TPU VM."""
    for name in (
        tpu_locate.GKE_ENDPOINTS,
        tpu_locate.NAME,
        tpu_locate.CONFIG,
        tpu_locate.WORKER_HOSTNAMES,
    ):
        if os.environ.get(name):
            return Evidence(True, f"{name} is set")
    for device in ("dev/accel0", "dev/vfio/0"):
        # A GPU that is passed through is a /dev/vfio/0 too, but not there.
        if (_ROOT / device).exists() and _on_compute_engine():
            return Evidence(True, f"/{device} is there, on a Google Cloud machine")
    return Evidence(False, f"{tpu_locate.NAME} is not set, and this is no TPU VM")


def kubernetes() -> Evidence:
    """A pod of an Indexed Job, which alone tells a pod its place."""
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
    """The name of the Indexed Job that this pod is of, and its index.

    Raises:
        ValueError: If the host name is not that of such a pod.
    """
    index = as_int(os.environ.get("JOB_COMPLETION_INDEX", ""), "JOB_COMPLETION_INDEX")
    hostname = os.environ.get("HOSTNAME", "")
    # Kubernetes names the host after the job and the index.
    job = hostname.removesuffix(f"-{index}")
    if not job or job == hostname:
        raise ValueError(
            f"Expected HOSTNAME to end in -{index}, as of pod {index} of an Indexed "
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
