"""Cluster resolvers: the tasks of a cluster, and this process's own."""

from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec
from keras_strategy.cluster_resolver.detection import detect
from keras_strategy.cluster_resolver.environment import (
    MPIClusterResolver,
    SageMakerClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from keras_strategy.cluster_resolver.google_api import GCEClusterResolver
from keras_strategy.cluster_resolver.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_strategy.cluster_resolver.simple import SimpleClusterResolver, UnionResolver
from keras_strategy.cluster_resolver.slurm import SlurmClusterResolver
from keras_strategy.cluster_resolver.tpu import TPUClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "detect",
]
