"""Which random numbers belong to rows, where a step cannot be called to find out.

A function that `run` calls is a user's, and is called once where it is not compiled:
what it prints or counts must not be there twice. Keras's own layers can be called
again. So of a draw the outermost layer is rehearsed that is Keras's, with all layers in
it, and that is called with the replica's rows; see `rules/draws.py`. What is drawn
elsewhere is each replica's own.
"""

import inspect
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.context import DryRun
from keras_strategy.core.registry import get_engine
from keras_strategy.core.row_range import RowRange
from keras_strategy.hooks.layers import is_keras_throughout
from keras_strategy.rules.draws import BatchDimCache

# The frame of a call of a layer has the arguments as Keras completed them.
_CALL = inspect.unwrap(keras.Layer.__call__).__code__

_known: weakref.WeakKeyDictionary[Any, BatchDimCache] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Call:
    """A call of a layer of Keras's.

    Attributes:
        layer: The layer.
        leaves: Its arguments.
        structure: Their structure.
        rows: The places in `leaves` of tensors of the replica's rows.
    """

    layer: Any
    leaves: list[Any]
    structure: Any
    rows: list[int]

    def dry_run(self, few: int) -> DryRun:
        """See `rules.draws.Rehearse`."""

        def call(*tensors):
            leaves = list(self.leaves)
            for place, tensor in zip(self.rows, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = tree.pack_sequence_as(self.structure, leaves)
            self.layer(*args, **kwargs)

        tensors = tuple(self.leaves[place] for place in self.rows)
        return get_engine().dry_run(call, tensors, {}, few)


class DrawsOfLayers:
    """In the place of `BatchDimCache`, what is known of the layers that draw in a run."""

    def for_current_layer(self, rows: RowRange) -> BatchDimCache | None:
        """See `BatchDimCache.for_current_layer`."""
        call = _outermost_call(rows.count)
        if call is None:
            return None
        known = _known.get(call.layer)
        if known is None:
            known = _known[call.layer] = BatchDimCache(repeated=True)
        return known


of_layers = DrawsOfLayers()


def rehearse_layer(few: int) -> DryRun:
    """See `rules.draws.Rehearse`; it calls the layer that is drawing."""
    replica = context.distributed_replica()
    assert replica is not None and replica.step.rows is not None
    call = _outermost_call(replica.step.rows.count)
    if call is None or replica.step.rows.count == 0:
        return DryRun(draws=[])
    return call.dry_run(few)


def _outermost_call(rows: int) -> _Call | None:
    """The outermost call of a layer of Keras's; None if that is given no rows."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is _CALL:
            given = frame.f_locals
            if not is_keras_throughout(given["self"]):
                break
            found = given
        frame = frame.f_back
    if found is None:
        return None
    structure = found["args"], found["kwargs"]
    leaves = tree.flatten(structure)
    of_rows = [
        place
        for place, leaf in enumerate(leaves)
        if len(getattr(leaf, "shape", ())) > 0 and leaf.shape[0] == rows
    ]
    return _Call(found["self"], leaves, structure, of_rows) if of_rows else None
