"""The adapters, one for each engine."""
