"""What an engine must do between the processes of a cluster.

Inside a program an engine's own collectives take care of the other processes. This is
for what each process holds by itself. Before values travel the workers compare what
they are about to do: engines hang or end the process where it differs.
"""

import abc
import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_strategy.errors import WorkerInputError, WorkersDifferError

if TYPE_CHECKING:
    from keras_strategy.workers.cluster import Cluster
    from keras_strategy.workers.member import Waiting

# A tensor's shape and dtype, of JSON's values.
Layout = list[Any]

DIGEST_BYTES = 7
# What may travel behind values that are added: see `tail_of`.
TAIL = 2 * DIGEST_BYTES
# For so many workers its sums are exact in float32.
MOST_WORKERS = 256


class Workers(abc.ABC):
    """The processes of a cluster, one call at a time.

    All workers make the same calls in the same order. What each call is for has a name
    that messages use.

    Args:
        cluster: The workers.

    Attributes:
        rank: This worker's number. Worker 0 is the chief.
        size: How many workers there are.
    """

    def __init__(self, cluster: "Cluster"):
        self.cluster = cluster
        self.rank, self.size = cluster.rank, cluster.size

    @abc.abstractmethod
    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """The sums of the workers' tensors, which travel together.

        Args:
            name: What they are for.
            tensors: Tensors of the same shapes and dtypes on all workers.

        Returns:
            New tensors.

        Raises:
            ValueError: If the shapes or dtypes differ.
            RuntimeError: If the workers make different calls.
        """

    @abc.abstractmethod
    def gather(self, name: str, tensor: Any, axis: int) -> tuple[Any, Any]:
        """The workers' tensors, joined in the order of their ranks.

        Args:
            name: What it is for.
            tensor: A tensor of rank 1 or more, whose sizes along `axis` may differ
                between workers.
            axis: Along which they are joined.

        Returns:
            The joined tensor, and each worker's size along `axis`.

        Raises:
            ValueError: If other sizes, or the dtypes, differ.
            RuntimeError: If the workers make different calls.
        """

    @abc.abstractmethod
    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """The chief's tensors, on every worker.

        Args:
            name: What they are.
            tensors: Tensors of the same shapes and dtypes on all workers. Where that
                is not known, `take_chiefs` asks first.
        """

    def sum(self, name: str, tensor: Any) -> Any:
        """The sum of the workers' tensors; see `sum_all`."""
        return self.sum_all(name, [tensor])[0]

    def take_chiefs(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """The chief's tensors, where those of the workers differ.

        Args:
            name: What they are.
            tensors: This worker's.

        Returns:
            For each tensor, None if it is the same on all workers to the last bit, as
            it should. Where workers bring different numbers of tensors, this is for as
            many as all of them bring.

        Raises:
            ValueError: If there are other tensors on other workers.
        """
        arrays = [keras.ops.convert_to_numpy(tensor) for tensor in tensors]
        layouts = [[list(array.shape), str(array.dtype)] for array in arrays]
        mine = [digest_of(array)[:24] for array in arrays]
        told = self.cluster.agree(kind_of(name), mine)
        count = min(map(len, told))
        results: list[Any] = [None] * count
        others = [i for i in range(count) if any(d[i] != mine[i] for d in told)]
        if not others:
            return results
        differing = [layouts[i] for i in others]
        differences = self.cluster.differences(name, differing)
        if differences is not None:
            raise ValueError(
                f"All workers must make the same variables. Received, for `{name}`: "
                f"{self.cluster.listed(map(described, differences))}."
            )
        chiefs = self.broadcast(name, [tensors[i] for i in others])
        for i, tensor in zip(others, chiefs, strict=True):
            results[i] = tensor
        return results

    def waiting(self, name: str) -> "Waiting":
        """Surrounds what waits for the others; see `workers.Member.waiting`."""
        return self.cluster.member.waiting(name)

    def difference(self, name: str, layout: Layout, which: str = "") -> Exception:
        """Asks all workers what they are about to do, which is not the same.

        Args:
            name: What this worker's call is for.
            layout: What it brings.
            which: See `refusal`.
        """
        operation = "the comparison of what is sent"
        told = self.cluster.agree(operation, [kind_of(name), *layout])
        return self.refusal(
            name, [call for call, *_ in told], [layout for _, *layout in told], which
        )

    def refusal(
        self, name: str, calls: Sequence[str], layouts: Sequence[Layout], which: str
    ) -> Exception:
        """What to raise where the workers are about to do different things.

        Args:
            name: What this worker's call is for.
            calls: What each worker's is for.
            layouts: What each brings.
            which: Words for which sizes must be the same.
        """
        if len(set(calls)) > 1:
            return WorkersDifferError(
                "All workers must make the same calls in the same order. They are in "
                f"different ones ({self.cluster.listed(f'`{c}`' for c in calls)})."
            )
        told = self.cluster.listed(described([layout]) for layout in layouts)
        return WorkerInputError(
            f"`{name}` needs values whose dtypes and sizes{which} are the same on "
            f"every worker. Received: {told}."
        )


@functools.lru_cache(maxsize=1024)
def digest_of_sum(kind: str, shape: tuple[int, ...], dtype: Any) -> bytes:
    """What tells a sum from others, in `DIGEST_BYTES` bytes.

    Args:
        kind: What it is for, see `kind_of`.
        shape: The shape of each worker's tensor.
        dtype: Its dtype.
    """
    layout = f"{kind}|{shape}|{dtype}"
    return hashlib.blake2b(layout.encode(), digest_size=DIGEST_BYTES).digest()


def tail_of(digest: bytes) -> list[int]:
    """The numbers by which workers notice that they add up different things.

    They are the digest's bytes and their squares. All workers send the same bytes if
    the mean of what they send is one of them and the variance is 0: if the sum of each
    number is as many times what one worker sends as there are workers.
    """
    return [*digest, *(byte * byte for byte in digest)]


def digest_of(array: np.ndarray) -> str:
    """A digest of an array's shape, dtype and bytes."""
    # The one that processors compute by themselves: 0.25 s for 100 million floats.
    digest = hashlib.sha256(f"{list(array.shape)} {array.dtype}".encode())
    digest.update(bytes_of(array).data)
    return digest.hexdigest()


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array; dtypes that NumPy does not know have no buffer."""
    return np.ascontiguousarray(array).reshape(-1).view("uint8")


def kind_of(name: str) -> str:
    """What a call is; names of variables count what a process has made before."""
    return name.partition(" '")[0]


def described(layouts: Sequence[Layout]) -> str:
    """Shapes and dtypes, for a message."""
    return " and ".join(f"{tuple(shape)} {dtype}" for shape, dtype in layouts)
