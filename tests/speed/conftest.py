"""Fixtures for counting."""

import keras
import pytest


@pytest.fixture
def compiled_here():
    """A program out of JAX's cache has lost the names that its profile is read by."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
