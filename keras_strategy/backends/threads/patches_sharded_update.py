"""Patches of optimizers that update a replica's shard of each weight."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.keras_patches.patch import home_of, hook, of_several

get_stateless_scope = home_of(
    "get_stateless_scope", "keras.src.backend.common.stateless_scope"
).get_stateless_scope


class ShardedUpdateScope(keras.StatelessScope):
    """The variables as an optimizer sees them that updates a replica's share.

    Args:
        around: The scope that holds all others.
        shares: What the replica updates, by the variables' `id`.
        variables: These variables.
    """

    def __init__(self, around: Any, shares: dict[int, Any], variables: Sequence[Any]):
        super().__init__(initialize_variables=False)
        self.around, self.shares, self._variables = around, shares, variables
        self._whole = [tuple(variable.shape) for variable in variables]

    def get_current_value(self, variable: Any) -> Any:
        share = self.shares.get(id(variable))
        return self.around.get_current_value(variable) if share is None else share

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if id(variable) in self.shares:
            self.write(variable, value)
        else:
            self.around.add_update(update)

    def write(self, variable: Any, value: Any) -> None:
        """Sets the replica's share of a variable."""
        raise NotImplementedError

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        """The squared norms of whole gradients, and their sum.

        Args:
            squares: Of each gradient that the replica was given, the squared norm of
                its share.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def shapes(self) -> Iterator[None]:
        """Lets the variables have the shapes of what the replica updates."""
        shapes = [tuple(self.shares[id(v)].shape) for v in self._variables]
        with self._of_shapes(shapes):
            yield

    def whole_shapes(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds what the replicas do together, of which others go on meanwhile."""
        return self._of_shapes(self._whole)

    @contextlib.contextmanager
    def _of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Iterator[None]:
        # The variables are the same objects for all replicas of this process.
        before = [variable._shape for variable in self._variables]
        try:
            self._give(shapes)
            yield
        finally:
            self._give(before)

    def _give(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for variable, shape in zip(self._variables, shapes, strict=True):
            variable._shape, variable._ndim = shape, len(shape)


@of_several
def current_update_scope(optimizer: Any) -> ShardedUpdateScope | None:
    """The scope in which an optimizer updates shares, if it does."""
    scope = get_stateless_scope()
    return scope if isinstance(scope, ShardedUpdateScope) else None


@hook(
    keras.optimizers.Optimizer,
    "_clip_gradients",
    "(self, grads)",
    when=current_update_scope,
)
def _clip_gradients(original, scope, self, grads):
    """Norms are those of whole gradients, of which each replica has its share."""
    if not (self.clipnorm or self.global_clipnorm):
        return original(self, grads)
    squares = [ops.sum(ops.square(gradient)) for gradient in grads]
    each, total = scope.squared_norms(squares)
    # As Keras computes it.
    if self.clipnorm:
        limit = self.clipnorm
        scales = [limit / ops.maximum(ops.sqrt(square), limit) for square in each]
    else:
        norm, limit = ops.sqrt(total), self.global_clipnorm
        scale = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(grads)
    pairs = zip(grads, scales, strict=True)
    return [gradient * ops.cast(scale, gradient.dtype) for gradient, scale in pairs]
