"""Cluster of workers: rendezvous, small exchanges and failure detection.

It imports no backend. Tensors are sent by the backend's own collectives; the control
connection carries only small values: who has joined, what each worker is about to do,
and which worker has failed.
"""

from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster.rendezvous import (
    default_timeout_seconds,
    rendezvous_address,
)

__all__ = ["CoordinatorClient", "default_timeout_seconds", "rendezvous_address"]
