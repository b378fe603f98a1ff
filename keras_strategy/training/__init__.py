"""What fit, evaluate and predict need on every backend."""
