"""Speed of keras_strategy beside its peers: `python -m benchmarks --help`."""
