"""Model of a data-parallel training step, and published measurements.

`python -m benchmarks.scaling.model` prints what it predicts of them.
"""

import dataclasses
from collections.abc import Mapping

from benchmarks.tables import markdown


@dataclasses.dataclass(frozen=True)
class Link:
    """Connection between workers.

    Attributes:
        latency: Seconds of a message of any size.
        bandwidth: Bytes per second that a worker sends, and receives at the same time.
    """

    latency: float
    bandwidth: float

    @classmethod
    def fitted(cls, workers: int, times: Mapping[int, float]) -> "Link":
        """Return the link that explains measured all-reduces of workers best.

        Least squares of the relative errors, so that small arrays count as large ones
        do. `times` are the seconds by the bytes of the array.
        """
        if len(times) < 2:
            raise ValueError(
                "Argument `times` must have two sizes or more, for a latency and a "
                f"bandwidth. Received: times={times!r}"
            )
        # times = a + b * size, each equation divided by its time.
        rows = [(1 / t, size / t) for size, t in times.items()]
        aa = sum(x * x for x, _ in rows)
        ab = sum(x * y for x, y in rows)
        bb = sum(y * y for _, y in rows)
        a_, b_ = sum(x for x, _ in rows), sum(y for _, y in rows)
        determinant = aa * bb - ab * ab
        fixed = (a_ * bb - b_ * ab) / determinant
        per_byte = (b_ * aa - a_ * ab) / determinant
        rounds = 2 * (workers - 1)
        return cls(latency=fixed / rounds, bandwidth=rounds / workers / per_byte)

    def all_reduce(self, workers: int, data: float) -> float:
        """Return the seconds of a ring all-reduce.

        In each of its 2 (N - 1) rounds a worker passes on 1/N of the data. No algorithm
        sends less: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms
        for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).
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

        Several workers may share a device, or a core.
        """
        share = max(1.0, workers_per_device)
        compute = self.compute * share
        # On a shared core, workers that compute keep the others from sending.
        comm = link.all_reduce(workers, self.gradients) * share
        return compute + max(0.0, comm - self.overlap * compute)

    def efficiency(self, workers: int, link: Link) -> float:
        """Return the speed of each device relative to one alone (weak scaling)."""
        return self.compute / self.seconds(workers, link)


# 25 Gbit/s. A message of NCCL over RoCE takes some 10 us; no publication of the anchors
# gives it, so it is an assumption.
ETHERNET_25 = Link(latency=10e-6, bandwidth=25e9 / 8)


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A published scaling efficiency.

    Attributes:
        model: The network.
        parameters: Its trainable parameters, of 4 bytes each.
        images_per_second: What one P100 trains alone (TensorFlow's benchmarks of May
            2017, synthetic data, https://www.tensorflow.org/performance/benchmarks).
        batch: The rows of one GPU there.
        devices: The number of GPUs of the measurement.
        efficiency: The speed of each of them as a share of what it has alone (README of
            Horovod, https://github.com/horovod/horovod: 128 servers with 4 Pascal GPUs
            each, connected by a RoCE-capable 25 Gbit/s network).
    """

    model: str
    parameters: int
    images_per_second: float
    batch: int
    devices: int
    efficiency: float

    def predict(self, devices: int) -> list[float]:
        """Return the efficiency without overlap, and with the maximum."""
        compute, gradients = self.batch / self.images_per_second, 4 * self.parameters
        steps = [Step(compute, gradients, overlap) for overlap in (0, 2 / 3)]
        return [step.efficiency(devices, ETHERNET_25) for step in steps]


ANCHORS = (
    Anchor("Inception V3", 23_851_784, 142, 64, 512, 0.90),
    Anchor("VGG-16", 138_357_544, 154, 64, 512, 0.68),
)


def main() -> None:
    """Print the predicted efficiencies beside the published ones."""
    counts, lines = (8, 64, 512), []
    for anchor in ANCHORS:
        ranges = [anchor.predict(devices) for devices in counts]
        cells = [f"{100 * low:.0f} to {high:.0%}" for low, high in ranges]
        name = f"{anchor.model}, {4 * anchor.parameters / 1e6:.0f} MB of gradients"
        lines.append((name, *cells, f"{anchor.efficiency:.0%}"))
    columns = [f"{devices} GPUs" for devices in counts]
    print(markdown(("", *columns, f"measured on {ANCHORS[0].devices}"), lines))


if __name__ == "__main__":
    main()
