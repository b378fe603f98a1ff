"""Device names, logical devices and the topology of replicas."""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# "gpu:0", "GPU:0", "/gpu:0", "/device:GPU:0", "cuda:0" and TensorFlow's full
# "/job:worker/replica:0/task:0/device:GPU:0" all name the same device.
_DEVICE_NAME = re.compile(
    r"^(?:/job:[^/]+/replica:\d+/task:\d+)?/?(?:device:)?(?P<kind>[a-z]+)"
    r"(?::(?P<index>\d+))?$"
)
_KINDS = {"cuda": "gpu", "rocm": "gpu"}


def canonical_device(name: str) -> str:
    """Return the canonical form of a device name, such as `"gpu:0"` for `"/GPU"`."""
    match = _DEVICE_NAME.match(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            "A device name must be a kind and index, such as 'gpu:0' or "
            f"'cpu:1'. Received: {name!r}"
        )
    kind = match["kind"]
    return f"{_KINDS.get(kind, kind)}:{int(match['index'] or 0)}"


def resolve_devices(
    devices: Iterable[str], available: Sequence[str]
) -> tuple[str, ...]:
    """Return the canonical names of the devices, which must be of one kind."""
    if isinstance(devices, str):
        raise ValueError(
            "Argument `devices` must be a list of device names, such as "
            f"['{devices}']. Received: devices={devices!r}"
        )
    requested = list(devices)
    received = f"Received: devices={requested!r}. Available devices: {list(available)}"
    if not requested:
        raise ValueError(
            "Argument `devices` must name at least one device, or be None for "
            f"all local devices. {received}"
        )
    names = [canonical_device(name) for name in requested]
    unknown = [name for name in names if name not in available]
    if unknown:
        raise ValueError(
            f"Argument `devices` names devices that are not available: {unknown}. "
            f"{received}"
        )
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Argument `devices` names devices more than once: {duplicates}. {received}"
        )
    kinds = sorted({name.split(":")[0] for name in names})
    if len(kinds) > 1:
        raise ValueError(
            "Argument `devices` must name devices of one kind, since all "
            f"replicas run the same program. Found kinds {kinds}. {received}"
        )
    return tuple(names)


def repeat_devices(
    devices: Sequence[str], virtual_replicas: int | None, workers: int = 1
) -> tuple[str, ...]:
    """Return the device of each of a worker's replicas."""
    number = workers * len(devices)
    if virtual_replicas is None:
        return tuple(devices)
    if virtual_replicas % number:
        every = range(1, virtual_replicas + 1)
        divisors = ", ".join(str(n) for n in every if virtual_replicas % n == 0)
        raise ValueError(
            "Argument `virtual_replicas` must be a multiple of the number of devices, "
            f"of which there are {number}. Received: "
            f"virtual_replicas={virtual_replicas}, which run on {divisors} devices."
        )
    count = virtual_replicas // number
    return tuple(device for device in devices for _ in range(count))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number in ascending order."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


@dataclass(frozen=True)
class LogicalDevices:
    """The devices of each replica and the layouts of variables on them."""

    # Canonical names, indexed by worker, replica and logical device.
    by_worker: tuple[tuple[tuple[str, ...], ...], ...]
    rank: int = 0
    # The `VariableLayouts`; None if every device holds every variable.
    layouts: Any = None

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """The logical devices of each replica of this worker."""
        return self.by_worker[self.rank]

    @property
    def per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return len(self.devices[0])


def partition_axes(parts: Sequence[int], logical: int) -> list[tuple[int, ...]] | None:
    """Return the mesh axes that split each dimension of a tensor.

    The mesh of the `logical` devices has one axis for each prime factor of their
    number, so every possible number of parts is a product of axis sizes. Return None if
    the devices cannot be split into that many parts of each dimension.
    """
    if logical % math.prod(parts):
        return None
    unused = list(enumerate(prime_factors(logical)))
    axes = []
    for number in parts:
        dim_axes = []
        for factor in prime_factors(number):
            axis = next(axis for axis in unused if axis[1] == factor)
            unused.remove(axis)
            dim_axes.append(axis[0])
        axes.append(tuple(dim_axes))
    return axes


@dataclass(frozen=True)
class ReplicaTopology:
    """The replicas of a strategy, numbered worker by worker."""

    # This worker's devices, one replica each. Every worker has as many.
    devices: tuple[str, ...]
    # The `Cluster`; None for a single process.
    cluster: Any = None
    # Sums over the replicas follow one binary tree, whatever the number of devices. A
    # device may have several replicas in a row, which share its copy of variables.
    sums_in_tree: bool = False

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of replicas over all workers."""
        return len(self.devices) * (1 if self.cluster is None else self.cluster.size)

    @functools.cached_property
    def local_replicas(self) -> range:
        """The replica ids of this worker."""
        count = len(self.devices)
        first = 0 if self.cluster is None else self.cluster.rank * count
        return range(first, first + count)
