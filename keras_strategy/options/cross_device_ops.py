"""How the user wants values to be combined over the devices.

These classes are choices. The engine does the work: TensorFlow has its own class for
each, JAX and torch decide by themselves.
"""

import logging
from collections.abc import Callable
from typing import Any

from keras_strategy.values.devices import canonical_device

logger = logging.getLogger("keras_strategy")


class CrossDeviceOps:
    """How gradients and `all_reduce` add up over the devices of a strategy.

    Give one of its subclasses to `MirroredStrategy`. On JAX and torch, and with one
    device, the choice has no effect, and a line in the log says so.
    """

    def say_that_it_has_no_effect(self, where: str) -> None:
        """Logs that somebody else decides.

        Args:
            where: What decides, such as `"JAX"`.
        """
        logger.info(
            "cross_device_ops=%r has no effect on %s, which decides by itself how "
            "values are combined.",
            self,
            where,
        )


class ReductionToOneDevice(CrossDeviceOps):
    """Copies the values to one device, adds them there, and copies the sum back.

    Args:
        reduce_to_device: The device's name; None for the first one.
        accumulation_fn: Adds a list of tensors, as `tf.add_n`, which is what None
            stands for. It is TensorFlow's alone.

    Raises:
        ValueError: If `reduce_to_device` is not the name of a device.
        TypeError: If `accumulation_fn` cannot be called.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(cross_device_ops=ks.ReductionToOneDevice())
    ```
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[Any], Any] | None = None,
    ):
        if reduce_to_device is not None:
            reduce_to_device = canonical_device(reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                "Argument `accumulation_fn` must be a function of a list of tensors, "
                f"or None. Received: accumulation_fn={accumulation_fn!r}"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def say_that_it_has_no_effect(self, where: str) -> None:
        """Logs that somebody else decides; what would change results is refused.

        Args:
            where: What decides, such as `"JAX"`.

        Raises:
            ValueError: If there is an `accumulation_fn`.
        """
        if self.accumulation_fn is not None:
            raise ValueError(
                f"Argument `accumulation_fn` of `ReductionToOneDevice` is not for "
                f"{where}, which adds values by itself. Leave it out. Received: "
                f"accumulation_fn={self.accumulation_fn!r}"
            )
        super().say_that_it_has_no_effect(where)

    def __repr__(self) -> str:
        return f"ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r})"


class _Packed(CrossDeviceOps):
    def __init__(self, num_packs: int = 1):
        if isinstance(num_packs, bool) or not isinstance(num_packs, int):
            raise TypeError(
                "Argument `num_packs` must be a whole number. Received: "
                f"num_packs={num_packs!r} of type {type(num_packs).__name__}"
            )
        if num_packs < 0:
            raise ValueError(
                "Argument `num_packs` must be 0 (no packing) or more. Received: "
                f"num_packs={num_packs}"
            )
        self.num_packs = num_packs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class NcclAllReduce(_Packed):
    """NVIDIA's collectives. It needs GPUs.

    Args:
        num_packs: Into how many packs values are put together before they travel; 0
            for none.

    Raises:
        TypeError: If `num_packs` is not a whole number.
        ValueError: If `num_packs` is negative.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.NcclAllReduce(num_packs=2).num_packs == 2
    ```
    """


class HierarchicalCopyAllReduce(_Packed):
    """Adds within groups of GPUs that are close to each other, then over the groups.

    It was made for machines of eight GPUs of the DGX-1 kind.

    Args:
        num_packs: Into how many packs values are put together before they travel; 0
            for none.

    Raises:
        TypeError: If `num_packs` is not a whole number.
        ValueError: If `num_packs` is negative.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(cross_device_ops=ks.HierarchicalCopyAllReduce())
    ```
    """


KINDS = (ReductionToOneDevice, NcclAllReduce, HierarchicalCopyAllReduce)


def check_cross_device_ops(cross_device_ops: Any) -> None:
    """Raises `TypeError` unless it is None or one of the choices there are."""
    if cross_device_ops is not None and not isinstance(cross_device_ops, KINDS):
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(
            f"Argument `cross_device_ops` must be None or one of {names} of this "
            "package: reducing is left to the engine. Received: cross_device_ops="
            f"{cross_device_ops!r} of type {type(cross_device_ops).__name__}"
        )
