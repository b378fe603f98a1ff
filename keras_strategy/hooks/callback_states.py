"""What callbacks have counted: it goes on where a training was interrupted."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.hooks.data_states import has_state
from keras_strategy.rules.plain import encode, decode

# What Keras's own callbacks count with. The last two of `ModelCheckpoint` have no
# public name.
_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save"),
        *("_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}
_WEIGHTS = "best_weights"


class CallbackStates:
    """The callbacks of one `fit` that count.

    They are `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`, and what has
    `state_dict()` and `load_state_dict(state)`.

    Args:
        callbacks: All callbacks of the user's.
    """

    def __init__(self, callbacks: Sequence[Any]):
        self._callbacks = [c for c in callbacks if _attributes(c) is not None]

    def read(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """What a file holds of them: of JSON's values, and arrays by their names."""
        told, arrays = [], {}
        for number, callback in enumerate(self._callbacks):
            names = _attributes(callback)
            if names:
                state = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            else:
                state = callback.state_dict()
            weights = (names and getattr(callback, _WEIGHTS, None)) or []
            kinds = [[list(w.shape), str(w.dtype)] for w in map(np.asarray, weights)]
            told.append([type(callback).__name__, encode(state), kinds])
            for at, value in enumerate(weights):
                arrays[f"callbacks/{number}/{at}"] = np.asarray(value)
        return told, arrays

    def set(self, told: list[Any], arrays: dict[str, np.ndarray], workers: Any) -> None:
        """Has them go on with what `read` gave; all workers call it.

        Args:
            told: Of JSON's values.
            arrays: The arrays, on the chief.
            workers: What brings tensors from the chief; None for one process.

        Raises:
            ValueError: If these are other callbacks.
        """
        names = [type(callback).__name__ for callback in self._callbacks]
        before = [name for name, *_ in told]
        if names != before:
            raise ValueError(
                "A training goes on with the callbacks that it was interrupted with, "
                f"in the same order: {', '.join(before) or 'none'}. Received: "
                f"{', '.join(names) or 'none'}."
            )
        for number, (callback, one) in enumerate(
            zip(self._callbacks, told, strict=True)
        ):
            _, state, kinds = one
            if not _attributes(callback):
                callback.load_state_dict(decode(state))
                continue
            for name, value in decode(state).items():
                setattr(callback, name, value)
            if kinds:
                weights = [
                    arrays.get(f"callbacks/{number}/{at}", np.zeros(shape, dtype))
                    for at, (shape, dtype) in enumerate(kinds)
                ]
                setattr(callback, _WEIGHTS, _of_chief(weights, workers))


def _of_chief(weights: list[np.ndarray], workers: Any) -> list[np.ndarray]:
    if workers is None:
        return weights
    tensors = [ops.convert_to_tensor(value) for value in weights]
    tensors = workers.broadcast("a backup's best weights", tensors)
    return [np.array(ops.convert_to_numpy(tensor)) for tensor in tensors]


def _attributes(callback: Any) -> tuple[str, ...] | None:
    """What a callback counts with; nothing where it says that itself."""
    if has_state(callback):
        return ()
    for kind, names in _KEPT.items():
        if isinstance(callback, kind):
            return names
    return None
