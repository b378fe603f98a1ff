"""Patches of Keras that every backend needs."""
