"""Names of tf.distribute that only TensorFlow has, and the reasons."""

_ASYNCHRONOUS = (
    "Workers update parameter servers asynchronously. Only TensorFlow implements that, "
    "and results differ from one device. Use MirroredStrategy or "
    "MultiWorkerMirroredStrategy, with `shard` if the model is too large for one "
    "device; or coordinator.ClusterCoordinator for asynchronous functions."
)
_SERVERS = (
    "JAX and torch have no servers that accept work. Workers find each other when "
    "MultiWorkerMirroredStrategy is created; `keras-strategy run` starts them. "
    "coordinator.ClusterCoordinator starts its own workers."
)
_CALLS = (
    "It calls TensorFlow functions, with their types, in another process, which only "
    "TensorFlow implements. Use coordinator.ClusterCoordinator, which starts its "
    "workers; or gRPC between your own programs."
)
REASONS = {
    "ParameterServerStrategy": _ASYNCHRONOUS,
    "Server": _SERVERS,
    "experimental.rpc.Client": _CALLS,
    "experimental.rpc.Server": _CALLS,
}
