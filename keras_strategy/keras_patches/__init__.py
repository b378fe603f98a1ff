"""Where Keras is extended, on every backend."""
