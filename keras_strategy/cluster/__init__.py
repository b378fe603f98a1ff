"""Cluster of workers: rendezvous, small exchanges and failure detection.

It imports no backend. Tensors are sent by the backend's own collectives; the control
connection carries only small values: who has joined, what each worker is about to do,
and which worker has failed.
"""
