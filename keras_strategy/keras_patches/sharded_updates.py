"""Patches of optimizers that update a replica's shard of each weight."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops
from keras.optimizers import Optimizer

from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.patch import hook, multi_replica_only


class ShardedUpdateScope(keras.StatelessScope):
    """The variables of an optimizer that updates a replica's shard of them."""

    # `shards` has the shards by the variables' `id`; `parent` is the scope of others.

    def __init__(self, parent: Any, shards: dict[int, Any], variables: Sequence[Any]):
        super().__init__(initialize_variables=False)
        self.parent_scope, self.shards, self._variables = parent, shards, variables
        self._full_shapes = [tuple(variable.shape) for variable in variables]

    def get_current_value(self, variable: Any) -> Any:
        shard = self.shards.get(id(variable))
        return self.parent_scope.get_current_value(variable) if shard is None else shard

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self.shards:
            self.write(variable, value)
        else:
            self.parent_scope.add_update(update)

    def write(self, variable: Any, value: Any) -> None:
        """Set the replica's shard of a variable."""

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the squared norms of the full gradients, given those of the shards."""
        # The second result is the sum over the gradients of all replicas.
        raise NotImplementedError

    @contextlib.contextmanager
    def shapes(self, full: bool = False) -> Iterator[None]:
        """Give the variables the shapes of the shards, or their full shapes."""
        # Use `full` around a collective: other replicas, which take their turns in it,
        # use the same variables.

        def set_shapes(shapes):
            for variable, shape in zip(self._variables, shapes, strict=True):
                variable._shape, variable._ndim = shape, len(shape)

        # The variables are the same objects for all replicas of this process.
        saved = [variable._shape for variable in self._variables]
        shards = [tuple(self.shards[id(v)].shape) for v in self._variables]
        try:
            set_shapes(self._full_shapes if full else shards)
            yield
        finally:
            set_shapes(saved)


@multi_replica_only
def current_update_scope(optimizer: Any) -> ShardedUpdateScope | None:
    """Return the scope in which an optimizer updates shards, if it does."""
    scope = current_stateless_scope()
    return scope if isinstance(scope, ShardedUpdateScope) else None


@hook(Optimizer, "_clip_gradients", "(self, grads)", when=current_update_scope)
def _clip_gradients(original, scope, self, grads):
    """Clip by the norms of the full gradients, of which each replica has a shard."""
    if not (self.clipnorm or self.global_clipnorm):
        return original(self, grads)
    squares = [ops.sum(ops.square(gradient)) for gradient in grads]
    norms, total = scope.squared_norms(squares)
    # Keras's formulas.
    if self.clipnorm:
        limit = self.clipnorm
        scales = [limit / ops.maximum(ops.sqrt(square), limit) for square in norms]
    else:
        norm, limit = ops.sqrt(total), self.global_clipnorm
        scale = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(grads)
    pairs = zip(grads, scales, strict=True)
    return [gradient * ops.cast(scale, gradient.dtype) for gradient, scale in pairs]
