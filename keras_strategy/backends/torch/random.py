"""Dropout on a CPU, with torch's numbers in half of the time.

torch keeps an element if a uniform number is below the probability. The number is the
low bits of a random integer, 24 or 53 of them, divided by a power of two. Most of the
time is spent on that conversion. To compare the integers themselves draws the same
mask, and leaves the generator in the same state.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

# Integers drawn at once: few enough for a core's cache.
_CHUNK = 1 << 14


def draws_like_torch() -> bool:
    """Return True if `draw_mask` draws the bits of this torch."""
    return _has_same_bits and torch.get_default_dtype() is torch.float32


def draw_mask(
    shape: Sequence[int],
    keep: float,
    generator: torch.Generator | None = None,
    is_tensor: bool = False,
    part: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Draw what `bernoulli_(keep)` or `bernoulli` of a tensor of `keep` draws."""
    # Of the leading dimension, `part` has the begin and end of what is needed, and the
    # size. The numbers of the rest are drawn, but not compared.
    if is_tensor:
        dtype, bits, keep = torch.int32, 24, float(np.float32(keep))
    else:
        dtype, bits = torch.int64, 53
    bound = math.ceil(keep * 2**bits)
    mask = torch.empty(shape, dtype=torch.bool, device="cpu")
    integers = torch.empty(min(mask.numel(), _CHUNK), dtype=dtype, device="cpu")
    total = mask.numel()
    begin, end, size = part or (0, 1, 1)
    begin, end = total // size * begin, total // size * end

    def skip(count: int) -> None:
        while count > 0:
            integers[:count].random_(generator=generator)
            count -= _CHUNK

    skip(begin)
    for needed in mask.view(-1)[begin:end].split(_CHUNK):
        drawn = integers[: len(needed)].random_(generator=generator)
        torch.lt(drawn.bitwise_and_(2**bits - 1), bound, out=needed)
    if not is_tensor:  # then Keras has made the generator for this draw alone
        skip(total - end)
    return mask


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """Return the axes in memory order, in which random masks are filled."""
    return tuple(sorted(range(x.dim()), key=lambda axis: -x.stride(axis)))


def make_in_order(
    make: Callable[[list[int]], torch.Tensor],
    shape: Sequence[int],
    order: Sequence[int],
) -> torch.Tensor:
    """Make a tensor whose axes have an order in memory."""
    back = sorted(range(len(shape)), key=order.__getitem__)
    return make([int(shape[axis]) for axis in order]).permute(back)


def scale_kept(
    inputs: torch.Tensor, mask: torch.Tensor, keep: float, is_seeded: bool
) -> torch.Tensor:
    """Apply dropout with the arithmetic of Keras, which depends on the seed."""
    if is_seeded or inputs.device.type != "cpu":
        return torch.where(mask, inputs / keep, 0.0)
    return inputs * mask.to(inputs.dtype).div_(keep)


def _compare_bits() -> bool:
    """Return True if torch draws as assumed: on some CPUs it takes MKL's numbers."""
    drawn = []
    for is_torch in (True, False):
        generator, masks = torch.Generator("cpu").manual_seed(0), []
        for keep in (0.1, 0.7):
            if is_torch:
                values = torch.full((99,), keep, dtype=torch.float32, device="cpu")
                masks.append(torch.bernoulli(values, generator=generator))
                masks.append(values.bernoulli_(keep, generator=generator))
            else:
                masks += [draw_mask([99], keep, generator, t) for t in (True, False)]
        drawn.append([*(mask.bool() for mask in masks), generator.get_state()])
    return all(map(torch.equal, *drawn))


_has_same_bits = _compare_bits()
