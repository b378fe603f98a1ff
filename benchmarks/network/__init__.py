"""Time of a training step on slow links: `python -m benchmarks.network`."""
