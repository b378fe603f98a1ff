"""Cluster resolvers: the tasks of a cluster, and this process's own."""

from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec
from keras_strategy.cluster_resolver.detection import detect
from keras_strategy.cluster_resolver.google.gce import GCEClusterResolver
from keras_strategy.cluster_resolver.google.tpu import TPUClusterResolver
from keras_strategy.cluster_resolver.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_strategy.cluster_resolver.mpi import MPIClusterResolver
from keras_strategy.cluster_resolver.sagemaker import SageMakerClusterResolver
from keras_strategy.cluster_resolver.simple import SimpleClusterResolver
from keras_strategy.cluster_resolver.slurm import SlurmClusterResolver
from keras_strategy.cluster_resolver.tf_config import TFConfigClusterResolver
from keras_strategy.cluster_resolver.torchrun import TorchrunClusterResolver
from keras_strategy.cluster_resolver.union import UnionResolver

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
