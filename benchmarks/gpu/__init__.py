"""What a machine with one or more GPUs can show: `python -m benchmarks.gpu`."""
