"""Predictions of a training step, from shapes and dtypes alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepTrace:
    """Bytes of one replica's step, without weights and slots."""

    activations: int  # tensors that the backward pass reads
    outputs: int = 0  # kept until the end of the step
    most_forward: int = 0  # at once in the forward pass
    most: int = 0  # and until the end of the backward pass, with the gradients
    most_lean: int = 0  # the same, without gradients that are complete
    update: int = 0  # temporaries of the optimizer
    # By the index of a weight: its bytes in the dtype in which a layer reads it.
    casts: Mapping[int, int] = field(default_factory=dict)
    saved: frozenset[int] = frozenset()  # weights that the backward pass reads


@dataclass(frozen=True)
class PlannedChoice:
    """Predicted bytes on the fullest device, and its traffic, with one `shard` option.

    Attributes:
        shard: The strategy's `shard` option.
        parameters: The trainable weights.
        gradients: Their gradients.
        slots: The optimizer's variables.
        others: The model's other variables.
        activations: Tensors that the backward pass reads, or None if unknown.
        peak: The most bytes at once, or None if unknown.
        collectives: The number of collectives in a step.
        sent: Bytes that a device sends in a step, in rings.
        communication_seconds: The time to send them, or None without a bandwidth.
        fits: False if the memory is too small or `shard` is unsupported; None if
            unknown.
        note: Why `shard` is unsupported, or a value is unknown.
    """

    shard: str | None
    parameters: int = 0
    gradients: int = 0
    slots: int = 0
    others: int = 0
    activations: int | None = None
    peak: int | None = None
    collectives: int = 0
    sent: int = 0
    communication_seconds: float | None = None
    fits: bool | None = None
    note: str = ""
