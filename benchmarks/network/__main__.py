"""Times the steps of three simulated machines, beside a peer on the same links.

    KERAS_BACKEND=torch python -m benchmarks.network [--links "20 ms" "no delay"]

The machines are network namespaces of this one, so it needs Linux and root. The peers
are DistributedDataParallel by hand, Keras's `DataParallel`, and a loop of native
tf.distribute.
"""

import argparse

import keras

from benchmarks.network.worker import CALLBACKS, time_step
from benchmarks.paired_processes import starter_for
from benchmarks.tables import markdown
from keras_strategy.testing import WorkerRunner
from tests.distributed.machines import simulated_machines

# Each way between two machines; "no delay" is the switch alone.
LINKS = {
    "no delay": {"delay_ms": 0.001},
    "20 ms": {"delay_ms": 20},
    "0.2 ms, 1 % loss": {"delay_ms": 0.2, "loss": 0.01},
    "100 Mbit/s": {"rate_mbit": 100},
}
MACHINES = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    options = parser.parse_args()
    backend = keras.backend.backend()
    print(markdown((f"{backend}, ms per step", "peer", *CALLBACKS), []))
    with starter_for(backend, MACHINES) as starter:
        for link in options.links:
            times: dict[str, float] = {}
            for name in ("peer", *CALLBACKS):
                runner = WorkerRunner(MACHINES, timeout_seconds=300, starter=starter)
                with simulated_machines(MACHINES, **LINKS[link]) as machines, runner:
                    times[name] = 1e3 * max(runner.run(time_step, name, machines))
            peer, *ours = times.values()
            cells = [f"{time:.0f} ({time / peer:.2f})" for time in ours]
            print(f"| {' | '.join((link, f'{peer:.0f}', *cells))} |", flush=True)


if __name__ == "__main__":
    main()
