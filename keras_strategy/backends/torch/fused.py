"""Adam in one pass over memory, by the kernel that torch has for it.

Every replica updates its own copy of the variables, so an update costs once for each of
them. Keras makes about twelve passes over all variables.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# That of `torch.optim.Adam(fused=True)`, for all tensors at once.
_adam: Callable[..., Any] = torch._fused_adam_  # pyright: ignore
# The kernel divides by 1 - beta**step, which this step makes 1.
_NO_CORRECTION = float("inf")


def kernel_accepts(
    gradients: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the kernel takes these tensors.

    Args:
        gradients: One or more gradients.
        tensors: What they update.
    """
    first, every = gradients[0], [*gradients, *tensors]
    return (
        first.is_floating_point()
        and first.layout is torch.strided
        and len({(t.dtype, t.device, t.layout) for t in every}) == 1
        and all([t.is_contiguous() for t in every])
    )


def fused_adam_step(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    rate: torch.Tensor,
    step: torch.Tensor,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """Updates variables and what Adam keeps of them, in place.

    The formula is Keras's, that of Kingma and Ba, 2014, before their section 2.1:
    variable -= alpha * momentum / (sqrt(velocity) + epsilon), where alpha is
    rate * sqrt(1 - beta_2**step) / (1 - beta_1**step). torch corrects the slots
    themselves, and has another epsilon; so it is told not to correct, and its learning
    rate is alpha.

    Args:
        tensors: The variables' tensors, then their momentums, their velocities, and
            with amsgrad the largest of these, all in the variables' order.
        gradients: The variables' gradients.
        rate: The learning rate, a scalar of the variables' dtype.
        step: The number of the step, from 1 on, likewise.
        betas: How much of momentums and velocities is kept.
        epsilon: What is added to the denominator.
    """
    # In the variables' dtype, as Keras does, where 0.999 is another number.
    alpha = rate * torch.sqrt(1 - torch.pow(betas[1], step))
    alpha = alpha / (1 - torch.pow(betas[0], step))
    count = len(gradients)
    number = torch.full((), _NO_CORRECTION, device=step.device)
    _adam(
        list(tensors[:count]),
        list(gradients),
        list(tensors[count : 2 * count]),
        list(tensors[2 * count : 3 * count]),
        list(tensors[3 * count :]),
        [number] * count,
        lr=alpha,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=epsilon,
        amsgrad=len(tensors) > 3 * count,
        maximize=False,
    )
