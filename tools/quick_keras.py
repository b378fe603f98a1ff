"""Imports Keras and the engine for tests: without what takes long and they do not use.

`tests/conftest.py` imports it, and so does the process that workers are forked from. It
is no part of `tests`, which workers import by themselves.
"""

import os
import sys
import threading

# What Keras imports for functions that no test calls, if it is there, takes as long as
# Keras itself: what plots, what wraps models for scikit-learn, and JAX on all backends.
_LEFT_OUT = ["matplotlib.pyplot", "sklearn"]
if os.environ.get("KERAS_BACKEND") in ("torch", "tensorflow"):
    _LEFT_OUT.append("jax")
_LEFT_OUT = [name for name in _LEFT_OUT if name not in sys.modules]

for name in _LEFT_OUT:
    sys.modules[name] = None  # type: ignore[assignment]
import keras  # noqa: E402

for name in _LEFT_OUT:
    del sys.modules[name]

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # Optimizing a graph takes longer than it saves in functions that run a few times.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    # Where autograph converts functions, a fifth of the time goes into finding out what
    # line of the user's each operation comes from.
    from tensorflow.python.util import tf_stack

    _lines = tf_stack.SentinelMapper().internal_map
    _files = tf_stack.SentinelFilter().internal_set
    _extract = tf_stack._tf_stack.extract_stack
    tf_stack.extract_stack = lambda stacklevel=1: _extract(_lines, _files, stacklevel)

if keras.backend.backend() == "jax":
    from jax._src.interpreters import mlir

    # One for each program would be a tenth of what it takes to compile a small program.
    _make_context, _contexts = mlir.make_ir_context, threading.local()

    def _context_of_thread():
        """Return the context that all programs of this thread share."""
        if not hasattr(_contexts, "made"):
            _contexts.made = _make_context()
        return _contexts.made

    mlir.make_ir_context = _context_of_thread
