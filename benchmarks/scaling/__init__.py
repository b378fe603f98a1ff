"""How long a training step takes on more workers: `python -m benchmarks.scaling`."""
