"""What the replicas of one call of `strategy.run` have in common."""

from collections.abc import Callable
from typing import Any

import torch

PARTIAL_UPDATE_NOTE = (
    "keras_strategy: the training step had begun to update the variables. They are "
    "the same on all replicas, but may be half-updated: load them again from a "
    "checkpoint before you go on."
)

# Large and odd, so that the seeds of replicas and of consecutive runs stay apart.
_STRIDE = 0x9E3779B1


class RunState:
    """One call of `strategy.run`, the same object for all its replicas."""

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._seed: int | None = None
        # What the first replica drew: how many others have not come there, and what.
        self._drawn: dict[Any, list[Any]] = {}

    def draw_once(
        self,
        index: int,
        what: Any,
        draw: Callable[[], torch.Tensor],
        skip: Callable[[], Any],
    ) -> torch.Tensor:
        """Draws what replicas draw alike, once if their tensors are in one memory.

        Args:
            index: The number of the replica. The first comes first.
            what: Tells what it draws from other draws of the run.
            draw: Draws.
            skip: See `Replica.draw_once`.
        """
        found = self._drawn.get(what)
        if index == 0 or found is None:
            numbers = draw()
            if index == 0 and self._replicas > 1 and numbers.device.type == "cpu":
                self._drawn[what] = [self._replicas - 1, numbers]
            return numbers
        skip()
        found[0] -= 1
        if found[0] == 0:
            del self._drawn[what]
        return found[1]

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
