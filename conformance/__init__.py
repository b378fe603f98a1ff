"""Conformance suite: programs that several systems train, compared with one device.

    python -m conformance --system accelerate --only batch_norm

A *program* is a function that returns a compiled Keras model, and a data set. A
*system* trains programs on N replicas. The reference is plain Keras on one device, with
the same backend and the same version of Keras. docs/conformance.md has the results, and
how to add a program or a system.
"""
