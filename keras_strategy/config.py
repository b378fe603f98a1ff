"""Process-wide settings, to be made before devices are used."""

import os
from typing import Any

from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches import consistency
from keras_strategy.training import random

_LOGICAL_CPUS = "KERAS_STRATEGY_LOGICAL_CPUS"
_divided = {"cpu": 0}


def set_logical_devices(device_type: str, count: int) -> None:
    """Divides the machine's device of a kind into several logical ones.

    It lets a strategy of several replicas run, and be tested, on a machine that
    has one device. Call it at the start of the program, before a tensor, a
    variable or a strategy is made. For CPUs the environment variable
    `KERAS_STRATEGY_LOGICAL_CPUS` does the same when `keras_strategy` is imported,
    which then imports Keras at once, and not with the first name that is used.

    Args:
        device_type: `"cpu"`, the kind that every backend can divide.
        count: The number of logical devices, 1 or more.

    Raises:
        ValueError: If `device_type` or `count` is not one that can be.
        RuntimeError: If devices are in use already.

    Example:

    ```python
    import keras_strategy as ks

    ks.config.set_logical_devices("cpu", 4)
    assert ks.MirroredStrategy(["cpu:0", "cpu:3"]).num_replicas_in_sync == 2
    ```
    """
    if not isinstance(device_type, str) or device_type.lower() != "cpu":
        raise ValueError(
            "Argument `device_type` must be 'cpu': accelerators are used as they "
            f"are. Received: device_type={device_type!r}"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            "Argument `count` must be a whole number of devices, 1 or more. "
            f"Received: count={count!r}"
        )
    get_engine().set_logical_devices("cpu", count)
    _divided["cpu"] = count


def logical_cpus() -> int:
    """How many devices the CPU was divided into here; 0 if it was not."""
    return _divided["cpu"]


def check_mirrored(enabled: bool = True) -> None:
    """Turns a debug mode on or off, in which lost mirrors are noticed.

    A mirrored variable has the same value on every replica. Code that assigns it
    something that depends on the replica breaks that, and training goes on with
    weights that differ. In this mode the components of all mirrored variables are
    compared after each `strategy.run` and each batch of `fit`, and an error names the
    variable and the replica. That copies every variable to the host each time; off,
    as it is in the beginning, it costs nothing. A `run` inside a function that
    TensorFlow is tracing is not looked at.

    Args:
        enabled: Whether to compare.

    Raises:
        TypeError: If `enabled` is neither True nor False.

    Example:

    ```python
    import keras_strategy as ks

    ks.config.check_mirrored(True)
    strategy = ks.MirroredStrategy()
    strategy.run(lambda: None)
    ks.config.check_mirrored(False)
    ```
    """
    _require_bool(enabled)
    consistency.enabled = enabled


def exact_random(enabled: bool = True) -> None:
    """Says whether replicas draw the random numbers of one device.

    In `fit`, `evaluate` and `predict` each replica draws what one device draws for the
    whole batch, and takes what belongs to its rows: a model with Dropout, noise or
    augmentation trains as on one device. So it does in `strategy.run` for a batch of a
    distributed dataset. So every device draws as much as one alone.
    Turned off, each replica draws for its own rows, from a seed of its own: as good
    noise, reproducible for the same number of replicas, and not one device's. On JAX
    `fit` is one program over all devices, and draws one device's numbers anyway.

    What is compiled already stays what it is: call it before training.

    Args:
        enabled: Whether they are one device's, as they are in the beginning.

    Raises:
        TypeError: If `enabled` is neither True nor False.

    Example:

    ```python
    import keras_strategy as ks

    ks.config.exact_random(False)
    assert ks.MirroredStrategy().num_replicas_in_sync >= 1
    ks.config.exact_random(True)
    ```
    """
    _require_bool(enabled)
    random.settings.exact = enabled


def _require_bool(enabled: Any) -> None:
    if not isinstance(enabled, bool):
        raise TypeError(
            f"Argument `enabled` must be True or False. Received: enabled={enabled!r}"
        )


def apply_environment() -> None:
    """Does what the environment asks for; called when the package is imported.

    Raises:
        ValueError: If KERAS_STRATEGY_LOGICAL_CPUS is not a number of devices.
    """
    count = os.environ.get(_LOGICAL_CPUS)
    if not count:
        return
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"The environment variable {_LOGICAL_CPUS} must be a whole number of "
            f"devices, 1 or more. Received: {_LOGICAL_CPUS}={count!r}"
        )
    set_logical_devices("cpu", int(count))
