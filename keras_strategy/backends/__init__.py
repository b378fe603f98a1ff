"""Adapters for the backends JAX, torch and TensorFlow."""
