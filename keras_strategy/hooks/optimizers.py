"""Where Keras's optimizers are extended on every backend."""

from typing import Any

import keras

from keras_strategy.core.context import DryRun, distributed_replica, thread_state
from keras_strategy.hooks.conditions import in_distributed_scope
from keras_strategy.hooks.hook import hook, of_several
from keras_strategy.rules.draws import EndOfDryRun

_APPLY = "(self, grads, trainable_variables=None)"


@of_several
def _in_distributed_scope_or_trial() -> Any:
    """The strategy whose scope this thread is in; or the trial."""
    return in_distributed_scope() or thread_state.dry_run


_WHEN = _in_distributed_scope_or_trial


@hook(keras.optimizers.Optimizer, "apply", _APPLY, when=_WHEN)
@hook(keras.optimizers.LossScaleOptimizer, "apply", _APPLY, when=_WHEN)
def _apply(original, strategy, self, grads, trainable_variables=None):
    """The gradients are summed over the replicas first, once.

    Then Keras's own code clips, accumulates, scales and applies on every replica, on
    equal inputs. The outermost optimizer does it: LossScaleOptimizer calls another.
    """
    if isinstance(strategy, DryRun):
        if strategy.gradients is not None:
            strategy.gradients += grads
            return None
        raise EndOfDryRun("gradients are applied")
    replica = distributed_replica()
    if replica is None:
        strategy.extended.group.check_cross_replica_apply()
    if replica is None or replica.step.is_applying:
        return original(self, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if not self.built and trainable_variables is not None:

        def build():
            if not self.built:
                self.build(trainable_variables)
                self.built = True

        replica.once(build)
    present = [grad for grad in grads if grad is not None]
    replica.step.optimizer, replica.step.reducing_gradients_of = self, trainable_variables
    if trainable_variables is not None and len(present) < len(grads):
        pairs = zip(grads, trainable_variables, strict=False)  # Keras counts them
        replica.step.reducing_gradients_of = [v for grad, v in pairs if grad is not None]
    weight, own = replica.step.row_weight, strategy.extended.custom_reducer
    try:
        if own is None:
            summed = list(replica.weighted_sum(present, weight))
        else:
            summed = list(own.weighted_sum(replica, present, weight))
    finally:
        replica.step.optimizer = replica.step.reducing_gradients_of = None
    if len(summed) < len(grads):
        rest = iter(summed)
        summed = [None if grad is None else next(rest) for grad in grads]
    replica.step.is_applying = True
    try:
        return original(self, summed, trainable_variables)
    finally:
        replica.step.is_applying = False
