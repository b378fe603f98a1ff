"""Where the torch adapter extends Keras for what an optimizer's replicas share."""

import logging
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.hooks import keras_scope, replica_here
from keras_strategy.backends.threads.hooks_shares import SharesScope
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.sharing import (
    DIVISION,
    Division,
    Updated,
    bring_together,
    own_part_of,
    part_of,
)
from keras_strategy.hooks.conditions import in_distributed_scope
from keras_strategy.hooks.hook import hook, of_several
from keras_strategy.rules.optimizer_rules import (
    is_elementwise,
    is_factored,
    is_weight_by_weight,
)
from keras_strategy.values.distributed import ReduceOp

logger = logging.getLogger("keras_strategy")

_SLOT_OF = "_ks_slot_of"


# These Keras makes without saying of which weight: lists in the weights' order.
_WITHOUT_REFERENCE = ("_r", "_c")
_told: set[type] = set()


@hook(
    keras.optimizers.Optimizer,
    "add_variable_from_reference",
    ("reference_variable",),
    several=True,
)
def _add_from_reference(original, self, reference_variable, *args, **kwargs):
    """What an optimizer keeps of a weight is shared when it is made, one at a time.

    What is made outside of scopes may come into one later: see `share_adopted`.
    """
    made = [original(self, reference_variable, *args, **kwargs)]
    if is_factored(self) and len(reference_variable.shape) > 1:
        lists = [vars(self).get(name) for name in _WITHOUT_REFERENCE]
        made += [of_weights[-1] for of_weights in lists if of_weights]
    strategy = in_distributed_scope()
    for slot in made:
        if strategy is None:
            vars(slot)[_SLOT_OF] = self, reference_variable
        else:
            _share(strategy, self, slot, reference_variable)
    return made[0]


def share_adopted(strategy: Any, slot: Any) -> bool:
    """Shares what an optimizer made outside of scopes, if that is known of a variable.

    Args:
        strategy: The strategy that it comes to.
        slot: The variable.

    Returns:
        Whether the replicas share it now.
    """
    optimizer, weight = vars(slot).pop(_SLOT_OF, (None, None))
    return optimizer is not None and _share(strategy, optimizer, slot, weight)


def _share(strategy: Any, optimizer: Any, slot: Any, weight: Any) -> bool:
    """Leaves each replica its share of a variable, if the strategy wants it to."""
    if strategy.shard is None or strategy.num_replicas_in_sync == 1:
        return False
    kind = type(optimizer)
    if not is_elementwise(optimizer) and not is_weight_by_weight(optimizer):
        if kind not in _told:
            _told.add(kind)
            logger.warning(
                "shard='optimizer': what the optimizer %s keeps stays whole on each "
                "replica, since it is none of Keras's own, whose rules are known: it "
                "may compute a weight's update of other weights. KERAS_BACKEND=jax "
                "splits what any optimizer keeps.",
                kind.__name__,
            )
        return False
    if weight.overwrite_with_gradient:  # by each replica, with the whole of it
        return False
    division = vars(optimizer).get(DIVISION)
    if division is None:
        division = Division(strategy.num_replicas_in_sync, is_elementwise(optimizer))
        vars(optimizer)[DIVISION] = division
    division.add(slot, weight, strategy.extended.group.layout)
    return True


# --- a step


class _Shared(SharesScope):
    """See `SharesScope`.

    Args:
        replica: The replica.
        shares: What the replica updates, by the variables' `id`.
        variables: These variables.
        numbers: Of the gradients that it is given, the numbers among those of all
            replicas.
        count: How many gradients these are.
    """

    def __init__(
        self,
        replica: TorchReplica,
        shares: dict[int, torch.Tensor],
        variables: Sequence[Any],
        numbers: Sequence[int],
        count: int,
    ):
        super().__init__(replica.scope, shares, variables)
        self._replica, self._numbers, self._count = replica, numbers, count

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.shares[id(variable)].copy_(value)

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        each: Any = torch.zeros(self._count, device=self._replica.scope.device)
        if squares:
            each[list(self._numbers)] = torch.stack(list(squares)).to(each)
        with self.whole_shapes():
            each = self._replica.all_reduce(ReduceOp.SUM, each)
        return [each[number] for number in self._numbers], torch.sum(each)


@of_several
def _division_of(optimizer: Any) -> Division | None:
    """How the replicas share what an optimizer keeps, if they do."""
    return vars(optimizer).get(DIVISION)


@hook(
    keras.optimizers.Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=_division_of,
)
def _apply_gradients(original, division, self, grads, trainable_variables):
    """Each replica updates its share, by Keras's own code.

    Before it the gradients were summed, and their loss unscaled. After it the weights
    are whole again, so that constraints are of whole weights.
    """
    replica = replica_here()
    if replica is None or not replica.sees_variables():
        scope = keras_scope()
        if scope is None or id(division.slots[0]) not in scope.state_mapping:
            raise RuntimeError(
                f"The replicas share what '{self.name}' keeps, so that all of them "
                "apply gradients, each to its share. Call `optimizer.apply` in a "
                "function that `strategy.run` is given, outside of `merge_call`."
            )
        return original(self, grads, trainable_variables)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    variables = [*weights, *division.slots]
    tensors = replica.to_overwrite(variables)
    parts, updated = {}, {}
    for variable, tensor in zip(variables, tensors, strict=True):
        parts[id(variable)] = tensor.detach()
    for weight in weights:
        tensor, shares = parts[id(weight)], division.shares(weight, weight.shape)
        parts[id(weight)] = part_of(tensor, shares, replica.id)
        updated[id(weight)] = Updated(tensor, parts[id(weight)], shares)
    given = [
        (number, own_part_of(gradient, updated[id(weight)].shares, replica.id), weight)
        for number, (gradient, weight) in enumerate(
            zip(grads, trainable_variables, strict=True)
        )
        # Elementwise rules take nothing, too, and all replicas count steps with it.
        if division.elementwise or updated[id(weight)].shares.size_of(replica.id)
    ]
    numbers, own, of_own = zip(*given, strict=True) if given else ((), (), ())
    scope = _Shared(replica, parts, variables, numbers, len(grads))
    with torch.no_grad():
        with scope, scope.shapes(), replica.updating(scope):
            original(self, list(own), list(of_own))
        changed = weights if self.ema_overwrite_frequency else trainable_variables
        bring_together(replica, [updated[id(weight)] for weight in changed])


@hook(
    keras.optimizers.Optimizer,
    "_apply_weight_decay",
    "(self, variables)",
    when=_division_of,
)
def _apply_weight_decay(original, division, self, variables):
    """A replica may have no weight that decays, which Keras does not expect."""
    variables = [v for v in variables if self._use_weight_decay(v)]
    if variables:
        original(self, variables)
