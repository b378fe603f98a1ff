"""Options of the communication between workers."""

import enum
import math
from dataclasses import dataclass
from typing import Any


class CommunicationImplementation(enum.Enum):
    """Library that carries values between workers.

    Attributes:
        AUTO: NCCL between GPUs, otherwise the backend's library for CPUs.
        RING: The backend's library for CPUs: gloo on torch, rings over gRPC on
            TensorFlow.
        NCCL: NVIDIA's NCCL, between GPUs only.

    Example:

    ```python
    import keras_strategy as ks

    auto = ks.experimental.CommunicationImplementation.AUTO
    assert ks.experimental.CommunicationImplementation("AUTO") is auto
    ```
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for the communication between workers.

    They change how long training takes, never its result.

    Args:
        bytes_per_pack: Maximum number of bytes of gradients in one collective; 0 lets
            the backend decide. Must be equal on all workers. Has an effect on
            TensorFlow; and on torch, where such packs are then reduced while the
            backward pass still computes, see [Several workers](several_workers.md).
            There each gradient is in one pack.
        timeout_seconds: How long workers wait for one that is alive but silent before
            all of them end, in seconds. None uses the environment variable
            KERAS_STRATEGY_TIMEOUT_SECONDS, or else 600.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        ValueError: If a value is invalid.

    Example:

    ```python
    import keras_strategy as ks

    options = ks.experimental.CommunicationOptions(timeout_seconds=120)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    ```
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self):
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise ValueError(
                "Argument `bytes_per_pack` must be 0 or a positive integer. Received: "
                f"bytes_per_pack={self.bytes_per_pack!r}"
            )
        timeout = self.timeout_seconds
        if timeout is not None and not (
            isinstance(timeout, int | float) and 0 < timeout < math.inf
        ):
            raise ValueError(
                "Argument `timeout_seconds` must be a positive number of seconds, or "
                f"None. Received: timeout_seconds={timeout!r}"
            )
        name = self.implementation
        # `tf.distribute`'s enum has the same names.
        name = name.name if isinstance(name, enum.Enum) else name
        members = CommunicationImplementation.__members__
        if not isinstance(name, str) or name.upper() not in members:
            raise ValueError(
                "Argument `implementation` must be a CommunicationImplementation or "
                f"one of {sorted(members)}. Received: "
                f"implementation={self.implementation!r}"
            )
        object.__setattr__(self, "implementation", members[name.upper()])


def check_communication_options(options: Any) -> CommunicationOptions:
    """Return the options, or the default ones for None.

    Raises:
        TypeError: If `options` has another type.
    """
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            "Communication options must be a `CommunicationOptions` or None. "
            f"Received: {options!r} of type {type(options).__name__}"
        )
    return options
