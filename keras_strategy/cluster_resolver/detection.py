"""`detect`: choice of the resolver from this process's environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from keras_strategy.cluster_resolver import evidence
from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.google.tpu import TPUClusterResolver
from keras_strategy.cluster_resolver.kubernetes import KubernetesClusterResolver
from keras_strategy.cluster_resolver.mpi import MPIClusterResolver
from keras_strategy.cluster_resolver.sagemaker import SageMakerClusterResolver
from keras_strategy.cluster_resolver.slurm import SlurmClusterResolver
from keras_strategy.cluster_resolver.tf_config import TFConfigClusterResolver
from keras_strategy.cluster_resolver.torchrun import TorchrunClusterResolver


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of `detect` for one kind of cluster.

    Attributes:
        name: The kind of cluster, such as `"torchrun"`.
        found: Whether the environment belongs to such a cluster.
        reason: The reason, as text.
        make_resolver: Makes its resolver. Only this may use the network.
    """

    name: str
    found: bool
    reason: str
    make_resolver: Callable[[], ClusterResolver]

    def __str__(self) -> str:
        return f"{self.name}: {'yes' if self.found else 'no'}, {self.reason}"


@dataclasses.dataclass(frozen=True)
class Detection:
    """Result of `detect`, which is true if there is a cluster.

    Attributes:
        findings: A `Finding` for every kind of cluster, in the order of
            precedence.
    """

    findings: tuple[Finding, ...]

    @property
    def chosen(self) -> Finding | None:
        """The first kind of cluster that was found, or `None`."""
        return next((finding for finding in self.findings if finding.found), None)

    def resolver(self) -> ClusterResolver | None:
        """Make the resolver of the chosen kind.

        Returns:
            A `ClusterResolver`; `None` if no cluster was found.

        Raises:
            ImportError: If the resolver needs an extra that is not installed.
            RuntimeError: If the environment is incomplete.
            ValueError: If the environment cannot be parsed.
        """
        return None if self.chosen is None else self.chosen.make_resolver()

    def __bool__(self) -> bool:
        return self.chosen is not None

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)


# In the order of precedence: TF_CONFIG is written for this program; then come the
# launchers, then the machine. A launcher often runs inside a Slurm step or a pod, never
# the other way round.
_KINDS: tuple[
    tuple[str, Callable[[], evidence.Evidence], Callable[[], ClusterResolver]], ...
] = (
    ("TF_CONFIG", evidence.find_tf_config, TFConfigClusterResolver),
    ("torchrun", evidence.find_torchrun, TorchrunClusterResolver),
    ("MPI", evidence.find_mpi, MPIClusterResolver),
    ("SageMaker", evidence.find_sagemaker, SageMakerClusterResolver),
    ("Slurm", evidence.find_slurm, SlurmClusterResolver),
    ("TPU", evidence.find_tpu, TPUClusterResolver),
    ("Kubernetes", evidence.find_kubernetes, lambda: _indexed_job_resolver()),
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
    findings = []
    for name, find, make_resolver in _KINDS:
        found, reason = find()
        findings.append(Finding(name, found, reason, make_resolver))
    return Detection(tuple(findings))


def _indexed_job_resolver() -> KubernetesClusterResolver:
    job, index = evidence.indexed_job()
    resolver = KubernetesClusterResolver({"worker": [f"job-name={job}"]})
    resolver.task_type = "worker"
    resolver.task_id = index
    return resolver
