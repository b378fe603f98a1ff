"""`detect`: choice of the resolver from the evidence in this process's environment."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

from keras_strategy.cluster_resolver import tpu
from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.cluster_spec import as_int
from keras_strategy.cluster_resolver.environment import (
    MPI_LAUNCHERS,
    TF_CONFIG,
    MPIClusterResolver,
    SageMakerClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from keras_strategy.cluster_resolver.kubernetes import KubernetesClusterResolver
from keras_strategy.cluster_resolver.slurm import SlurmClusterResolver
from keras_strategy.cluster_resolver.tpu import TPUClusterResolver

_ROOT = Path("/")

# Whether a kind of cluster was found, and why.
Evidence = tuple[bool, str]


def _find_variables(*names: str) -> Evidence:
    missing = [name for name in names if not os.environ.get(name)]
    if not missing:
        return True, f"{', '.join(names)} are set"
    verb = "is" if len(missing) == 1 else "are"
    return False, f"{', '.join(missing)} {verb} not set"


def _find_tf_config() -> Evidence:
    text = os.environ.get(TF_CONFIG)
    if not text:
        return False, f"{TF_CONFIG} is not set"
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        # It is meant for this program: the resolver reports the error in it.
        return True, f"{TF_CONFIG} is set (but is not JSON)"
    if isinstance(config, dict) and not config.get("cluster"):
        return False, f'{TF_CONFIG} is set, but has no "cluster"'
    return True, f"{TF_CONFIG} is set"


def _find_mpi() -> Evidence:
    for launcher in MPI_LAUNCHERS:
        if not launcher.is_present:
            continue
        # srun sets PMI variables as well. Slurm's own also have the hosts.
        if (
            os.environ[launcher.rank] == os.environ.get("SLURM_PROCID")
            and os.environ[launcher.size] == os.environ.get("SLURM_STEP_NUM_TASKS")
            and launcher.rank == "PMI_RANK"
        ):
            return False, "PMI_RANK and PMI_SIZE are those of Slurm's srun"
        return True, f"{launcher.rank} and {launcher.size} are set"
    names = " and ".join(launcher.rank for launcher in MPI_LAUNCHERS)
    return False, f"{names} are not set"


def _find_slurm() -> Evidence:
    found, reason = _find_variables(
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        *("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
    )
    if not found and os.environ.get("SLURM_JOB_ID"):
        return False, "a Slurm job, but not a step: start with srun"
    # `srun --pty bash` is a step too, but a shell on one node.
    if found and os.environ["SLURM_STEP_NUM_TASKS"] == "1":
        return False, "a Slurm step of one task only"
    return found, reason


def _find_tpu() -> Evidence:
    for name in tpu.TPU_VARIABLES:
        if os.environ.get(name):
            return True, f"{name} is set"
    for device in ("dev/accel0", "dev/vfio/0"):
        # Elsewhere /dev/vfio/0 may be a GPU that is passed through.
        if (_ROOT / device).exists() and _is_on_compute_engine():
            return True, f"/{device} exists on a Google Cloud machine"
    return False, f"{tpu.TPU_NAME} is not set, and this is not a TPU VM"


def _is_on_compute_engine() -> bool:
    try:
        product = (_ROOT / "sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False
    return product.strip() == "Google Compute Engine"


def _find_kubernetes() -> Evidence:
    """Check for a pod of an Indexed Job, the only kind with an index."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return False, "KUBERNETES_SERVICE_HOST is not set"
    if not os.environ.get("JOB_COMPLETION_INDEX"):
        return (
            False,
            "a pod, but not of an Indexed Job (JOB_COMPLETION_INDEX is not set): make "
            "a KubernetesClusterResolver yourself",
        )
    try:
        job, index = _indexed_job()
    except ValueError as error:
        return False, str(error)
    return True, f"this is pod {index} of the Indexed Job {job}"


def _indexed_job() -> tuple[str, int]:
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


def _indexed_job_resolver() -> KubernetesClusterResolver:
    job, index = _indexed_job()
    resolver = KubernetesClusterResolver({"worker": [f"job-name={job}"]})
    resolver.task_type, resolver.task_id = "worker", index
    return resolver


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of `detect` for one kind of cluster."""

    name: str
    found: bool
    reason: str
    # Only this may use the network.
    make_resolver: Callable[[], ClusterResolver]

    def __str__(self) -> str:
        return f"{self.name}: {'yes' if self.found else 'no'}, {self.reason}"


@dataclasses.dataclass(frozen=True)
class Detection:
    """Result of `detect` for every kind of cluster; true if there is a cluster."""

    findings: tuple[Finding, ...]

    @property
    def chosen(self) -> Finding | None:
        """The first kind of cluster that was found, or `None`."""
        return next((finding for finding in self.findings if finding.found), None)

    def resolver(self) -> ClusterResolver | None:
        """Make the resolver of the chosen kind; return `None` without a cluster."""
        return None if self.chosen is None else self.chosen.make_resolver()

    def __bool__(self) -> bool:
        return self.chosen is not None

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)


# Other launchers set these variables as well.
_find_torchrun = functools.partial(
    _find_variables, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)
_find_sagemaker = functools.partial(_find_variables, "SM_HOSTS", "SM_CURRENT_HOST")

_Kind = tuple[str, Callable[[], Evidence], Callable[[], ClusterResolver]]
# In the order of precedence: TF_CONFIG is written for this program; then come the
# launchers, then the machine. A launcher often runs inside a Slurm step or a pod, never
# the other way round.
_KINDS: tuple[_Kind, ...] = (
    ("TF_CONFIG", _find_tf_config, TFConfigClusterResolver),
    ("torchrun", _find_torchrun, TorchrunClusterResolver),
    ("MPI", _find_mpi, MPIClusterResolver),
    ("SageMaker", _find_sagemaker, SageMakerClusterResolver),
    ("Slurm", _find_slurm, SlurmClusterResolver),
    ("TPU", _find_tpu, TPUClusterResolver),
    ("Kubernetes", _find_kubernetes, _indexed_job_resolver),
)


def detect() -> Detection:
    """Detect the cluster that this process belongs to.

    The order is: TF_CONFIG, torchrun, MPI, SageMaker, Slurm, TPU, Kubernetes (an
    Indexed Job). Compute Engine's instance groups leave no evidence in a process:
    make a `GCEClusterResolver` yourself.

    It reads only environment variables and files of this machine; `resolver()`
    makes the resolver, which may then use the network.

    Returns:
        A `Detection`: `chosen` and `resolver()` of the first kind that was
        found, and the reasons for all as its text.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import detect

    os.environ.update(RANK="1", WORLD_SIZE="2",
                      MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    detection = detect()
    print(detection)  # one line for each kind of cluster, with the reason
    assert detection.chosen.name == "torchrun"
    assert detection.resolver().task_id == 1
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ```
    """
    return Detection(tuple(Finding(name, *find(), make) for name, find, make in _KINDS))
