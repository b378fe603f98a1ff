"""Time of a training step on more workers: `python -m benchmarks.scaling`."""
