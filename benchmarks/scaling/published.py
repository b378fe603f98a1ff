"""Published measurements, with the constants that the model needs."""

from dataclasses import dataclass

from benchmarks.scaling.model import Link, Step

# 25 Gbit/s. A message of NCCL over RoCE takes some 10 us; no publication of the anchors
# gives it, so it is an assumption.
ETHERNET_25 = Link(latency=10e-6, bandwidth=25e9 / 8)


@dataclass(frozen=True)
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

    def step(self, overlap: float) -> Step:
        """Return the step of one GPU."""
        return Step(
            compute=self.batch / self.images_per_second,
            gradients=4 * self.parameters,
            overlap=overlap,
        )


ANCHORS = (
    Anchor("Inception V3", 23_851_784, 142, 64, 512, 0.90),
    Anchor("VGG-16", 138_357_544, 154, 64, 512, 0.68),
)
