"""Measurements on a machine with GPUs: `python -m benchmarks.gpu`."""
