"""Imports Keras and the engine for tests: without what takes long and they do not use.

`tests/conftest.py` imports it, and so does the process that workers are forked from. It
is no part of `tests`, which workers import by themselves.
"""

import os
import sys

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

    # What it would save, functions that run a few times do not take.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
