"""What the replicas of one call of `strategy.run` have in common."""

import torch

HALF_WRITTEN = (
    "keras_strategy: the training step had begun to update the variables. They are "
    "the same on all replicas, but may be half-updated: load them again from a "
    "checkpoint before you go on."
)

# Large and odd, so that the seeds of replicas and of consecutive runs stay apart.
_STRIDE = 0x9E3779B1


class Run:
    """One call of `strategy.run`, the same object for all its replicas."""

    def __init__(self) -> None:
        self._seed: int | None = None

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """A replica's own generator, for what Keras draws from the process's.

        Its state, which workers have in common, decides what all of them draw, and
        advances only if one asks.

        Args:
            index: The number of the replica.
            device: Where it draws.
        """
        if self._seed is None:
            self._seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(device=device)
        return generator.manual_seed((self._seed + index * _STRIDE) % 2**63)
