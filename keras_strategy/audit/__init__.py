"""Comparison of a step on several replicas with the same step on one device."""
