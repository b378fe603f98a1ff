"""tf.distribute's RPC server and client, available with TensorFlow."""

from typing import TYPE_CHECKING, Any

from keras_strategy.core.registry import native_or_unsupported

if TYPE_CHECKING:
    Client: Any
    Server: Any

__all__ = ["Client", "Server"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "Server"):
        return native_or_unsupported(f"experimental.rpc.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
