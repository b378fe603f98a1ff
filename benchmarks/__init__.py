"""How fast keras_strategy is beside its peers: `python -m benchmarks --help`."""
