"""The JAX adapter: `fit` is one sharded program, `run` is a shard_map."""

from keras_strategy.backends.jax.engine import JaxEngine

engine = JaxEngine()
