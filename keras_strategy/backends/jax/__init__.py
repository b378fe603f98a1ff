"""The JAX adapter: `fit` is one sharded program, `run` is a shard_map."""

from keras_strategy.backends.jax.adapter import JaxBackend

backend = JaxBackend()
