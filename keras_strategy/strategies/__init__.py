"""Strategies: each is a choice of devices."""
