"""How values travel between workers: hints for the engine."""

import enum
import math
from dataclasses import dataclass
from typing import Any


class CommunicationImplementation(enum.Enum):
    """Which library carries values between workers.

    Attributes:
        AUTO: NCCL between GPUs, else what the engine has for CPUs.
        RING: What the engine has for CPUs: gloo on torch, rings over gRPC on
            TensorFlow.
        NCCL: NVIDIA's NCCL, between GPUs alone.

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
    """Hints about how values travel between workers.

    They change how long it takes, never what comes out.

    Args:
        bytes_per_pack: How many bytes of gradients travel together, at most; 0 lets
            the engine decide. All workers give the same. It has an effect on
            TensorFlow; and on torch, where gradients then leave in such packs while
            others are computed, see [Several workers](several_workers.md). There a
            variable's gradient is in one pack.
        timeout_seconds: How long workers wait for one that is alive and silent
            before all of them end, in seconds. None takes the environment variable
            KERAS_STRATEGY_TIMEOUT_SECONDS, or else 600.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        ValueError: If one of them has a value that it cannot have.

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
        # `tf.distribute`'s is an enum of the same names.
        name = name.name if isinstance(name, enum.Enum) else name
        known = CommunicationImplementation.__members__
        if not isinstance(name, str) or name.upper() not in known:
            raise ValueError(
                "Argument `implementation` must be a CommunicationImplementation or "
                f"one of {sorted(known)}. Received: "
                f"implementation={self.implementation!r}"
            )
        object.__setattr__(self, "implementation", known[name.upper()])


def check_communication_options(options: Any) -> CommunicationOptions:
    """Returns the communication options of a call or strategy.

    Args:
        options: `CommunicationOptions`, or None for the default ones.

    Raises:
        TypeError: If `options` is something else.
    """
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            "Communication options must be a `CommunicationOptions` or None. "
            f"Received: {options!r} of type {type(options).__name__}"
        )
    return options
