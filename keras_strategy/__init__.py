"""Distributed training for Keras 3, with tf.distribute's API, on any backend.

Names are imported on first use, and Keras and its backend with them, so that processes
that only start or watch others need neither. Type checkers read `__init__.pyi`.
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# Home module of each public name; the first entry lists modules.
_HOMES = {
    "keras_strategy": (
        "callbacks",
        "cluster_resolver",
        "config",
        "coordinator",
        "errors",
        "experimental",
        "tpu",
    ),
    "keras_strategy.core.context": (
        "ReplicaContext",
        "experimental_set_strategy",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "keras_strategy.core.unsupported_names": (
        "ParameterServerStrategy",
        "Server",
    ),
    "keras_strategy.data.distributed_dataset": (
        "DistributedDataset",
        "DistributedIterator",
    ),
    "keras_strategy.data.sharding_policy": ("files",),
    "keras_strategy.data.indexed_dataset": ("IndexedDataset",),
    "keras_strategy.data.splitting": ("predict",),
    "keras_strategy.options": (
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "RunOptions",
    ),
    "keras_strategy.training.cross_device_ops": (
        "CrossDeviceOps",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "ReductionToOneDevice",
    ),
    "keras_strategy.training.row_weights": (
        "compute_average_loss",
        "scale_regularization_loss",
        "value_and_grad",
        "weight_by_rows",
    ),
    "keras_strategy.strategies.base": ("Strategy",),
    "keras_strategy.strategies.extended": ("StrategyExtended",),
    "keras_strategy.strategies.mirrored": (
        "MirroredStrategy",
        "OneDeviceStrategy",
    ),
    "keras_strategy.strategies.multi_worker": ("MultiWorkerMirroredStrategy",),
    "keras_strategy.strategies.inspect": (
        "profile",
        "visualize",
    ),
    "keras_strategy.strategies.tpu": ("TPUStrategy",),
    "keras_strategy.values": (
        "DistributedValues",
        "Mirrored",
        "PerReplica",
        "ReduceOp",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])  # pyright: ignore


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    # Any public name may need the default strategy, which registers on import.
    importlib.import_module("keras_strategy.strategies")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# The CPU must be split before first use, and a program may use it through Keras alone
# before it uses a name of this package.
if os.environ.get("KERAS_STRATEGY_LOGICAL_CPUS"):
    importlib.import_module("keras_strategy.config").apply_environment()
