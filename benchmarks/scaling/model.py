"""Model of a data-parallel training step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """Connection between workers.

    Attributes:
        latency: Seconds of a message of any size.
        bandwidth: Bytes per second that a worker sends, and receives at the same time.
    """

    latency: float
    bandwidth: float

    def all_reduce(self, workers: int, data: float) -> float:
        """Return the seconds of a ring all-reduce.

        In each of its 2 (N - 1) rounds a worker passes on 1/N of the data. No algorithm
        sends less: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
        for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).

        Args:
            workers: Their number N.
            data: The bytes of one worker's array.
        """
        rounds = 2 * (workers - 1)
        return rounds * (self.latency + data / workers / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Step:
    """Data-parallel training step.

    Attributes:
        compute: Seconds of a step on one worker alone, with that worker's rows.
        gradients: The bytes of one copy of the gradients.
        overlap: The share of `compute` that overlaps with the all-reduce: 0 if that
            starts when all gradients are there; at most 2/3 if each gradient is sent at
            once, since the backward pass does two thirds of the arithmetic.
    """

    compute: float
    gradients: float
    overlap: float = 0.0

    def seconds(self, workers: int, link: Link, workers_per_device: float = 1) -> float:
        """Return the seconds of a step, with the same rows for each worker.

        Args:
            workers: Their number.
            link: The connection between them.
            workers_per_device: How many workers share a device, or a core.
        """
        share = max(1.0, workers_per_device)
        compute = self.compute * share
        # On a shared core, workers that compute keep the others from sending.
        comm = link.all_reduce(workers, self.gradients) * share
        return compute + max(0.0, comm - self.overlap * compute)

    def efficiency(
        self, workers: int, link: Link, workers_per_device: float = 1
    ) -> float:
        """Return the speed of each device relative to one alone (weak scaling)."""
        share = max(1.0, workers_per_device)
        return self.compute * share / self.seconds(workers, link, workers_per_device)
