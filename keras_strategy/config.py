"""Process-wide settings, to be made before devices are used."""

import os
from typing import Any

from keras_strategy.audit import policy as _audit
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches import consistency
from keras_strategy.training import random

_LOGICAL_CPUS = "KERAS_STRATEGY_LOGICAL_CPUS"
_logical_cpus = 0


def set_logical_devices(device_type: str, count: int) -> None:
    """Split the machine's device of a type into several logical devices.

    A strategy with several replicas can then run, and be tested, on a machine with one
    device. Call it at the start of the program, before a tensor, a variable or a
    strategy is created. The environment variable `KERAS_STRATEGY_LOGICAL_CPUS` does the
    same when `keras_strategy` is imported, which then imports Keras at once.

    Args:
        device_type: `"cpu"`, the only type that every backend can split.
        count: The number of logical devices, 1 or more.

    Raises:
        ValueError: If `device_type` or `count` is invalid.
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
            "Argument `device_type` must be 'cpu': accelerators cannot be "
            f"split. Received: device_type={device_type!r}"
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            "Argument `count` must be a whole number of devices, 1 or more. "
            f"Received: count={count!r}"
        )
    global _logical_cpus
    get_engine().set_logical_devices("cpu", count)
    _logical_cpus = count


def logical_cpus() -> int:
    """Return the number of logical devices set here for the CPU; 0 if none."""
    return _logical_cpus


def check_mirrored(enabled: bool = True) -> None:
    """Turn a debug mode on or off that compares mirrored variables.

    Code that assigns a value that depends on the replica makes the components of a
    mirrored variable differ, and training continues with them. In this mode they are
    compared after each `strategy.run` and each batch of `fit`, and an error names the
    variable and the replica. That copies every variable to the host each time. A `run`
    inside a function that TensorFlow is tracing is not checked.

    Args:
        enabled: True to compare. The mode is off by default.

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
    consistency.check_each_batch = enabled


def audit(mode: str = "exact") -> None:
    """Choose what `fit`, `evaluate` and `predict` do where replicas differ.

    On torch and TensorFlow, each replica computes on its rows, which equals one device
    if rows are independent of each other, losses are means, and so on. Where some part
    of a model, loss, metric, optimizer or step is not Keras's own, the first step is
    therefore audited, see `keras_strategy.verify`: at the cost of a few steps on some
    rows. On JAX those loops are one program over all rows.

    Args:
        mode: `"exact"`, the default: a function whose step differs from one device's,
            or fails on a part of the rows, runs whole from then on. It computes all
            rows of each batch at once, as on one device and as fast as one, and a
            warning names the place and how to split it. `"warn"` logs the warning,
            and splits the step, so the result differs. `"raise"` raises
            `RuntimeError` instead. `"off"` does not audit, and a first step made
            meanwhile is not audited later.

    Raises:
        ValueError: If `mode` is unknown.

    Example:

    ```python
    import keras_strategy as ks

    ks.config.audit("raise")
    ks.config.audit("exact")
    ```
    """
    if mode not in _audit.MODES:
        raise ValueError(
            f"Argument `mode` must be one of {', '.join(map(repr, _audit.MODES))}. "
            f"Received: mode={mode!r}"
        )
    _audit.mode = mode


def exact_random(enabled: bool = True) -> None:
    """Choose whether replicas draw the same random numbers as one device.

    By default, each replica draws for the global batch in `fit`, `evaluate` and
    `predict`, and in `strategy.run` for a batch of a distributed dataset, and takes the
    slice of its rows: a model with Dropout, noise or augmentation trains as on one
    device, but every device draws as much as one would. When turned off, each replica
    draws only for its own rows, from its own seed: the noise is as good, and
    reproducible for the same number of replicas, but differs from one device's. On JAX,
    `fit` is one program over all devices and draws one device's numbers in either case.

    Call it before training: compiled programs do not change.

    Args:
        enabled: True, the default, for the numbers of one device.

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
    """Apply environment variables; called when the package is imported.

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
