"""Collectives between the processes of a cluster.

In a compiled program the backend's own collectives connect the processes; these are for
values that each process holds. Workers first compare what they are about to send, since
backends hang or abort if it differs; of a sum, by a checksum in the same collective.
"""

import abc
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.errors import WorkerInputError, WorkersDifferError
from keras_strategy.options import CommunicationImplementation

# A tensor's shape and dtype, in JSON types.
Layout = list[Any]

CHECKSUM_BYTES = 7
# Numbers in `checksum_tail`, which follows summed values.
CHECKSUM_TAIL = 2 * CHECKSUM_BYTES
# Up to this many workers the checksum's sums are exact in float32.
MAX_CHECKSUM_WORKERS = 256


class WorkerCollectives(abc.ABC):
    """Collectives of a cluster's processes, which all make the same calls in order."""

    # `name` is the purpose of the tensors, for messages.

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.rank, self.size = cluster.rank, cluster.size
        self.track_operation = cluster.client.track_operation

    @abc.abstractmethod
    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Sum tensors of equal layouts over the workers, in one collective."""

    @abc.abstractmethod
    def gather(self, name: str, tensor: Any, axis: int) -> tuple[Any, Any]:
        """Concatenate the workers' tensors in rank order."""
        # The result also has their sizes along `axis`. ValueError if others differ.

    @abc.abstractmethod
    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Return the chief's tensors, which have the same layouts on all workers."""

    def sum(self, name: str, tensor: Any) -> Any:
        return self.sum_all(name, [tensor])[0]

    def broadcast_if_different(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Return the chief's tensors, or None for those with the same bits on all."""
        arrays = [keras.ops.convert_to_numpy(tensor) for tensor in tensors]
        layouts = [[list(array.shape), str(array.dtype)] for array in arrays]
        local = [array_digest(array)[:24] for array in arrays]
        digests = self.cluster.exchange(operation_kind(name), local)
        count = min(map(len, digests))
        results: list[Any] = [None] * count
        differing = [i for i in range(count) if any(d[i] != local[i] for d in digests)]
        if not differing:
            return results
        differences = self.cluster.values_if_different(
            name, [layouts[i] for i in differing]
        )
        if differences is not None:
            raise ValueError(
                f"All workers must create the same variables. Received, for `{name}`: "
                f"{self.cluster.format_by_worker(map(describe_layouts, differences))}."
            )
        chiefs = self.broadcast(name, [tensors[i] for i in differing])
        for i, tensor in zip(differing, chiefs, strict=True):
            results[i] = tensor
        return results

    def mismatch_error(self, name: str, layout: Layout, which: str = "") -> Exception:
        """Ask all workers what they are about to do, and return the error to raise."""
        call = [operation_kind(name), *layout]
        received = self.cluster.exchange("the comparison of calls", call)
        calls = [call for call, *_ in received]
        layouts = [layout for _, *layout in received]
        return self.calls_differ_error(name, calls, layouts, which)

    def calls_differ_error(
        self, name: str, calls: Sequence[str], layouts: Sequence[Layout], which: str
    ) -> Exception:
        """Return the error for workers whose calls, or `which` sizes, differ."""
        if len(set(calls)) > 1:
            received = self.cluster.format_by_worker(f"`{call}`" for call in calls)
            return WorkersDifferError(
                "All workers must make the same calls in the same order. They make "
                f"different calls ({received})."
            )
        received = self.cluster.format_by_worker(
            describe_layouts([layout]) for layout in layouts
        )
        return WorkerInputError(
            f"`{name}` needs values whose dtypes and sizes{which} are the same on "
            f"every worker. Received: {received}."
        )


def check_nccl(cluster: Cluster, has_gpus: bool, library: str) -> None:
    """Raise `ValueError` if the user chose NCCL, and a library finds no GPUs."""
    is_nccl = cluster.options.implementation is CommunicationImplementation.NCCL
    if is_nccl and not has_gpus:
        raise ValueError(
            f"CommunicationImplementation.NCCL needs GPUs, but {library} finds none. "
            "Use AUTO or RING."
        )


@functools.lru_cache(maxsize=1024)
def call_checksum(kind: str, shape: tuple[int, ...], dtype: Any) -> bytes:
    """Return `CHECKSUM_BYTES` bytes that identify a sum: its kind, shape and dtype."""
    layout = f"{kind}|{shape}|{dtype}"
    return hashlib.blake2b(layout.encode(), digest_size=CHECKSUM_BYTES).digest()


def checksum_tail(digest: bytes) -> list[int]:
    """Return the numbers that detect workers summing different things."""
    # If each sum is the number of workers times the local number, the workers' bytes
    # have variance 0, so all are equal.
    return [*digest, *(byte * byte for byte in digest)]


def array_digest(array: np.ndarray) -> str:
    """Return a digest of an array's shape, dtype and bytes."""
    # SHA-256 has hardware support: 0.25 s for 100 million floats.
    digest = hashlib.sha256(f"{list(array.shape)} {array.dtype}".encode())
    # As integers, since some dtypes have no buffer protocol.
    digest.update(np.ascontiguousarray(array).reshape(-1).view("uint8").data)
    return digest.hexdigest()


def operation_kind(name: str) -> str:
    """Return a call's name without the variable's, which depends on creation order."""
    return name.partition(" '")[0]


def describe_layouts(layouts: Sequence[Layout]) -> str:
    """Format shapes and dtypes for a message."""
    return " and ".join(f"{tuple(shape)} {dtype}" for shape, dtype in layouts)
