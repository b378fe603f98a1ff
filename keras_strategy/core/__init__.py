"""What adapters promise, and who is in charge: nothing here knows an engine."""
