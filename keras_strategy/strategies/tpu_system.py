"""The TPU that a resolver names: its topology, and its hosts' devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategy.cluster_resolver import roles
from keras_strategy.core.registry import get_engine
from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.strategies.workers import connect_workers
from keras_strategy.values.tpu_topology import Topology
from keras_strategy.workers.cluster import Cluster


@dataclass(frozen=True)
class TPUSystem:
    """A TPU, of which each host has as many cores.

    Attributes:
        topology: Where its cores are; its tasks are the hosts.
        device_names: The canonical names that each host has for its cores, in the
            order of the topology.
    """

    topology: Topology
    device_names: tuple[str, ...]

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.topology.num_tasks

    def device_at(self, coordinates: Sequence[int]) -> tuple[int, str]:
        """The host of the core at coordinates, and its name there."""
        ordinal = self.topology.tpu_device_ordinal_at_coordinates(coordinates)
        if ordinal < 0:
            raise ValueError(
                f"The TPU has no core at {[int(x) for x in coordinates]}, where an "
                "assignment has one."
            )
        host = self.topology.task_ordinal_at_coordinates(coordinates)
        return int(host), self.device_names[ordinal]


def find_tpu_system(resolver: Any) -> tuple[TPUSystem, Cluster | None]:
    """The TPU of a resolver, or this machine's, and its hosts if it has several.

    These must all ask for it: they meet, and tell each other where their cores are.

    Args:
        resolver: A resolver that brings its own `tpu_system`, as a simulated TPU does;
            or one of a TPU; or None.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If there is no TPU here, or its hosts have other numbers of cores.
    """
    if resolver is not None and not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "A TPU is found by a `keras_strategy.cluster_resolver.TPUClusterResolver`, "
            "by what `keras_strategy.testing.simulated_tpu` returns, or by None. "
            f"Received: {resolver!r} of type {type(resolver).__name__}"
        )
    workers = None
    if resolver is not None and host_count(resolver) > 1:
        workers = connect_workers(resolver, CommunicationOptions())
    simulated = getattr(resolver, "tpu_system", None)
    if isinstance(simulated, TPUSystem):
        return simulated, workers
    places = get_engine().tpu_coordinates()
    of_hosts = [places] if workers is None else workers.exchange("the TPU", places)
    if not all(of_hosts):
        raise ValueError(
            "There is no TPU on this machine, for the Keras backend "
            f"'{get_engine().name}'. Run this on a TPU VM, or pass what "
            "`keras_strategy.testing.simulated_tpu((2, 2, 1, 2))` returns. Received: "
            f"{resolver!r}"
        )
    numbers = list(map(len, of_hosts))
    if len(set(numbers)) > 1:
        raise ValueError(
            "All hosts of a TPU must have as many cores. Received: "
            f"{workers.format_by_worker(numbers) if workers else numbers}."
        )
    coordinates = np.array(of_hosts, np.int32)
    coordinates -= coordinates.min(axis=(0, 1))
    topology = Topology(
        mesh_shape=coordinates.max(axis=(0, 1)) + 1, device_coordinates=coordinates
    )
    return TPUSystem(topology, tuple(f"tpu:{i}" for i in range(numbers[0]))), workers


def host_count(resolver: Any) -> int:
    """The number of hosts that a resolver names."""
    spec = resolver.cluster_spec()
    if not spec:
        return 1
    train = roles.training_addresses(spec)
    return len(train or spec.job_tasks(resolver.task_type))


def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Returns the topology of a TPU.

    The engine makes the TPU ready when it is first used; there is nothing to be done.
    The hosts of a TPU that has several must all call it: they meet.

    Args:
        cluster_resolver: A `cluster_resolver.TPUClusterResolver`, or what
            `testing.simulated_tpu` returned; None is this machine's TPU.

    Returns:
        A `Topology`.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If there is no TPU.

    Example:

    ```python
    import keras_strategy as ks
    from keras_strategy.testing import simulated_tpu

    tpu = simulated_tpu((2, 1, 1, 2))
    topology = ks.tpu.experimental.initialize_tpu_system(tpu)
    assert topology.num_tpus_per_task == 4
    ```
    """
    return find_tpu_system(cluster_resolver)[0].topology


def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Looks for the TPU, as `initialize_tpu_system` does, and leaves it as it is.

    An engine gives its TPU back when the process ends.

    Args:
        cluster_resolver: See `initialize_tpu_system`.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If there is no TPU.
    """
    find_tpu_system(cluster_resolver)
