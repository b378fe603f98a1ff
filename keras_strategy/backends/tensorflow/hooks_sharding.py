"""Where the TensorFlow adapter extends Keras for what an optimizer's replicas share."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_strategy.backends.tensorflow.replica import TensorFlowReplica
from keras_strategy.backends.tensorflow.sharing import own_part_of, part_of, with_part
from keras_strategy.backends.threads.hooks_divisions import (
    applied_outside,
    division_of,
)
from keras_strategy.backends.threads.hooks_shares import SharesScope, scope_of_shares
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import hook, of_several
from keras_strategy.hooks.variables import stored
from keras_strategy.rules.sharding import Shares, shares_of
from keras_strategy.values.distributed import ReduceOp

# As TensorFlow calls what a checkpoint holds of a variable.
_VALUE = "VARIABLE_VALUE"


class _Share:
    """A replica's share of a variable.

    Args:
        replica: The replica.
        variable: The variable.
        shares: Which elements of it each replica updates.
        is_slot: Whether the replica holds no others.
    """

    def __init__(
        self, replica: TensorFlowReplica, variable: Any, shares: Shares, is_slot: bool
    ):
        self.shares, self.shape = shares, shares.shape_of(replica.id)
        self._replica, self._variable, self._is_slot = replica, variable, is_slot

    def read(self) -> Any:
        """What it is; of a slot the variable, which Keras may read when it changed."""
        held = self._replica.own(stored(self._variable))
        return held if self._is_slot else part_of(held, self.shares, self._replica.id)

    def write(self, value: Any) -> None:
        """Sets it; also where TensorFlow computes one of two branches."""
        if not self._is_slot:
            held = tf.convert_to_tensor(self._replica.own(stored(self._variable)))
            value = with_part(held, value, self.shares, self._replica.id)
        self._replica.write_held(self._variable, value)


class _SharesOfReplica(SharesScope):
    """See `SharesScope`.

    Args:
        replica: The replica.
        shares: What the replica updates, by the variables' `id`.
        variables: These variables.
        norms: The squared norms of the gradients that it is given, and their sum over
            all; None where they are not clipped by them.
    """

    def __init__(
        self,
        replica: TensorFlowReplica,
        shares: dict[int, _Share],
        variables: Sequence[Any],
        norms: tuple[list[Any], Any] | None,
    ):
        super().__init__(None, shares, variables)
        self._replica, self._norms = replica, norms

    def get_current_value(self, variable: Any) -> Any:
        share = self.shares.get(id(variable))
        return None if share is None else share.read()

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        share = self.shares.get(id(variable))
        if share is None:
            self._replica.write(variable, value)
        else:
            share.write(value)

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        assert self._norms is not None
        return self._norms


@hook(
    keras.optimizers.Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=division_of,
)
def _apply_gradients(original, division, self, grads, trainable_variables):
    """Each replica updates its share, by Keras's own code.

    Before it the gradients were summed, and their loss unscaled. After it the weights
    are whole again, so that constraints are of whole weights.
    """
    replica: Any = distributed_replica()
    if replica is None:
        raise applied_outside(self)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    variables, shares = [*weights, *division.slots], {}
    for variable in weights:
        of_weight = division.shares(variable, variable.shape)
        shares[id(variable)] = _Share(replica, variable, of_weight, False)
    for variable in division.slots:
        of_slot = shares_of(variable)
        assert of_slot is not None
        shares[id(variable)] = _Share(replica, variable, of_slot, True)
    numbers = division.given_to(replica.id, trainable_variables)
    of_own = [trainable_variables[number] for number in numbers]
    own = [
        own_part_of(grads[number], shares[id(weight)].shares, replica.id)
        for number, weight in zip(numbers, of_own, strict=True)
    ]
    norms = None
    if self.clipnorm or self.global_clipnorm:
        norms = _norms(replica, _to_clip(self, own, of_own, shares), numbers, grads)
        # Keras's clipping adds up what occurs more than once, after it took the norms.
        own = [tf.convert_to_tensor(gradient) for gradient in own]
    scope = _SharesOfReplica(replica, shares, variables, norms)
    with scope, scope.shapes():
        original(self, own, of_own)
    changed = weights if self.ema_overwrite_frequency else trainable_variables
    parts = [shares[id(weight)].read() for weight in changed]
    wholes = replica.together(parts, [shares[id(weight)].shares for weight in changed])
    for weight, whole in zip(changed, wholes, strict=True):
        replica.write(weight, whole)


@hook(keras.optimizers.Optimizer, "_var_key", "(self, variable)", when=scope_of_shares)
def _var_key(original, scope, self, variable):
    """An optimizer knows a weight by what holds it, of which it updates a share."""
    return original(self, stored(variable))


def _to_clip(
    optimizer: Any, own: list[Any], of_own: list[Any], shares: dict[int, _Share]
) -> list[Any]:
    """What an optimizer clips: of gradients that it accumulates, their mean.

    As Keras computes it. It is computed in the other steps as well, since the replicas
    cannot meet where TensorFlow computes one of two branches.
    """
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return own
    accumulated = [
        shares[
            id(optimizer._accumulated_gradients[optimizer._get_variable_index(weight)])
        ].read()
        for weight in of_own
    ]
    return [(g + acc) / steps for g, acc in zip(own, accumulated, strict=True)]


def _norms(
    replica: TensorFlowReplica, own: list[Any], numbers: list[int], grads: list[Any]
) -> tuple[list[Any], Any]:
    """The squared norms of whole gradients, and their sum."""
    dtype = max((gradient.dtype for gradient in grads), key=lambda dtype: dtype.size)
    squares = [tf.zeros((), dtype)] * len(grads)
    for number, gradient in zip(numbers, own, strict=True):
        # By Keras's functions, as it computes them of rows that occur more than once.
        squares[number] = ops.cast(ops.sum(ops.square(gradient)), dtype)
    each = replica.all_reduce(ReduceOp.SUM, tf.stack(squares))
    return [each[number] for number in numbers], tf.reduce_sum(each)


# --- native checkpoints


@of_several
def _shares(variable: Any) -> Shares | None:
    """Which elements of a variable each replica keeps, if they share it."""
    return shares_of(variable)


@hook(keras.Variable, "_shared_name", None, when=_shares)
def _shared_name(original, shares, self):
    """A checkpoint names the variable itself, whose value is a tensor."""
    return stored(self)._shared_name


@hook(keras.Variable, "_serialize_to_tensors", "(self)", when=_shares)
def _serialize_to_tensors(original, shares, self):
    """TensorFlow's checkpoints hold whole variables, for any number of replicas."""
    return {_VALUE: self.value}


@hook(
    keras.Variable,
    "_restore_from_tensors",
    "(self, restored_tensors)",
    when=_shares,
)
def _restore_from_tensors(original, shares, self, restored_tensors):
    """Of what a checkpoint holds each replica takes its share."""
    self.assign(restored_tensors[_VALUE])
    return self.value
