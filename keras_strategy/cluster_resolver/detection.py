"""`detect`: which resolver this process's environment speaks for."""

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
    """What the environment says of one kind of cluster.

    Attributes:
        name: The kind of cluster, such as `"torchrun"`.
        found: Whether the environment speaks for it.
        reason: Why, or why not, in words.
        make_resolver: Makes its resolver. Only this may ask the network.
    """

    name: str
    found: bool
    reason: str
    make_resolver: Callable[[], ClusterResolver]

    def __str__(self) -> str:
        return f"{self.name}: {'yes' if self.found else 'no'}, {self.reason}"


@dataclasses.dataclass(frozen=True)
class Detection:
    """What `detect` found: true if there is a cluster.

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
        """Makes the resolver of the chosen kind.

        Returns:
            A `ClusterResolver`; `None` if no cluster was found.

        Raises:
            ImportError: If the resolver needs an extra that is not installed.
            RuntimeError: If the environment turns out to be incomplete.
            ValueError: If it cannot be understood.
        """
        return None if self.chosen is None else self.chosen.make_resolver()

    def __bool__(self) -> bool:
        return self.chosen is not None

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)


# The order of precedence: what was written for this very program, then the
# launcher nearest to it, then the machine it happens to run on. A launcher is
# often started inside a Slurm step or a pod, never the other way round.
_KINDS: tuple[
    tuple[str, Callable[[], evidence.Evidence], Callable[[], ClusterResolver]], ...
] = (
    ("TF_CONFIG", evidence.tf_config, TFConfigClusterResolver),
    ("torchrun", evidence.torchrun, TorchrunClusterResolver),
    ("MPI", evidence.mpi, MPIClusterResolver),
    ("SageMaker", evidence.sagemaker, SageMakerClusterResolver),
    ("Slurm", evidence.slurm, SlurmClusterResolver),
    ("TPU", evidence.tpu, TPUClusterResolver),
    ("Kubernetes", evidence.kubernetes, lambda: _indexed_job_resolver()),
)


def detect() -> Detection:
    """Finds out which cluster this process's environment speaks for.

    Looked for in this order: TF_CONFIG, torchrun, MPI, SageMaker, Slurm, TPU,
    Kubernetes (an Indexed Job). Compute Engine's instance groups leave no trace
    in a process: make a `GCEClusterResolver` yourself.

    Only environment variables and files of this machine are read; a resolver
    is made, and may then ask the network, when `resolver()` is called.

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
    for name, look, make_resolver in _KINDS:
        found, reason = look()
        findings.append(Finding(name, found, reason, make_resolver))
    return Detection(tuple(findings))


def _indexed_job_resolver() -> KubernetesClusterResolver:
    job, index = evidence.indexed_job()
    resolver = KubernetesClusterResolver({"worker": [f"job-name={job}"]})
    resolver.task_type = "worker"
    resolver.task_id = index
    return resolver
