from typing import Any

from keras_strategy import (
    callbacks,
    cluster_resolver,
    config,
    coordinator,
    errors,
    experimental,
    tpu,
)
from keras_strategy.audit.report import AuditReport
from keras_strategy.audit.verify import verify, verify_run
from keras_strategy.core.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from keras_strategy.data.distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
)
from keras_strategy.data.row_independence import row_independent
from keras_strategy.data.sources.indexed import IndexedDataset
from keras_strategy.data.splitting import files, predict
from keras_strategy.keras_patches.fingerprint import Fingerprint, fingerprint
from keras_strategy.keras_patches.saving import CheckpointManager
from keras_strategy.local_workers import launch
from keras_strategy.options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
)
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.elastic import run_elastic
from keras_strategy.strategies.extended import StrategyExtended
from keras_strategy.strategies.inspect import profile
from keras_strategy.strategies.mirrored import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from keras_strategy.strategies.plan import plan
from keras_strategy.strategies.tpu import TPUStrategy
from keras_strategy.training.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from keras_strategy.training.row_weights import (
    compute_average_loss,
    scale_regularization_loss,
    value_and_grad,
    weight_by_rows,
)
from keras_strategy.values import DistributedValues, Mirrored, PerReplica, ReduceOp

__version__: str
ParameterServerStrategy: Any  # tf.distribute's
Server: Any

__all__ = [
    "AuditReport",
    "CheckpointManager",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Fingerprint",
    "HierarchicalCopyAllReduce",
    "IndexedDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "__version__",
    "callbacks",
    "cluster_resolver",
    "compute_average_loss",
    "config",
    "coordinator",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "files",
    "fingerprint",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "plan",
    "predict",
    "profile",
    "row_independent",
    "run_elastic",
    "scale_regularization_loss",
    "tpu",
    "value_and_grad",
    "verify",
    "verify_run",
    "weight_by_rows",
]
