"""The TPU that a resolver names: its topology, and the devices of this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategy.core.registry import get_engine
from keras_strategy.values.tpu_topology import Topology


@dataclass(frozen=True)
class TPUSystem:
    """A TPU of one host.

    Attributes:
        topology: Where its cores are.
        device_names: Their canonical names, in the order of the topology.
    """

    topology: Topology
    device_names: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """The names of all cores."""
        return self.device_names

    def name_at(self, coordinates: Sequence[int]) -> str:
        """The name of the core at coordinates; an error if there is none."""
        ordinal = self.topology.tpu_device_ordinal_at_coordinates(coordinates)
        if ordinal < 0:
            raise ValueError(
                f"The TPU has no core at {[int(x) for x in coordinates]}, where an "
                "assignment has one."
            )
        return self.device_names[ordinal]


def find_system(resolver: Any) -> TPUSystem:
    """The TPU of a resolver, or this machine's.

    Args:
        resolver: A resolver that brings its own `tpu_system`, as a simulated TPU does;
            or one of this machine's TPU; or None.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If there is no TPU here.
        NotImplementedError: If it has several hosts.
    """
    simulated = getattr(resolver, "tpu_system", None)
    if isinstance(simulated, TPUSystem):
        return simulated
    if resolver is not None and not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "A TPU is found by a `keras_strategy.cluster_resolver.TPUClusterResolver`, "
            "by what `keras_strategy.testing.simulated_tpu` returns, or by None. "
            f"Received: {resolver!r} of type {type(resolver).__name__}"
        )
    if resolver is not None and _hosts(resolver) > 1:
        raise NotImplementedError(
            f"A TPU of several hosts is not served yet. Received: {resolver!r}, of "
            f"{_hosts(resolver)} hosts. `MultiWorkerMirroredStrategy` trains on all of "
            "its cores, a replica on each."
        )
    places = get_engine().coordinates_of_tpus()
    if not places:
        raise ValueError(
            "There is no TPU on this machine, for the Keras backend "
            f"'{get_engine().name}'. Run this on a TPU VM, or pass what "
            "`keras_strategy.testing.simulated_tpu((2, 2, 1, 2))` returns. Received: "
            f"{resolver!r}"
        )
    coordinates = np.array(places, np.int32)
    coordinates -= coordinates.min(axis=0)
    topology = Topology(
        mesh_shape=coordinates.max(axis=0) + 1, device_coordinates=coordinates[None]
    )
    return TPUSystem(topology, tuple(f"tpu:{i}" for i in range(len(places))))


def _hosts(resolver: Any) -> int:
    spec = resolver.cluster_spec()
    return len(spec.job_tasks(resolver.task_type)) if spec else 1


def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Returns the topology of a TPU.

    The engine makes the TPU ready when it is first used; there is nothing to be done.

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
    return find_system(cluster_resolver).topology


def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Looks for the TPU, as `initialize_tpu_system` does, and leaves it as it is.

    An engine gives its TPU back when the process ends.

    Args:
        cluster_resolver: See `initialize_tpu_system`.

    Raises:
        TypeError: If it is no resolver.
        ValueError: If there is no TPU.
    """
    find_system(cluster_resolver)
