"""Times the steps of three simulated machines, beside a peer on the same links.

    KERAS_BACKEND=torch python -m benchmarks.network [--links "20 ms" "1 % loss"]

The machines are network namespaces of this one, so it needs Linux and root. The peers
are DistributedDataParallel by hand, Keras's `DataParallel`, and a loop of native
tf.distribute.
"""

import argparse
import json

import keras

from benchmarks.network import worker
from benchmarks.sides import starter_for
from keras_strategy.testing import WorkerRunner
from tests.distributed.machines import simulated_machines

# Each way between two machines; "no delay" is the switch alone.
LINKS = {
    "no delay": {"delay_ms": 0.001},
    "20 ms": {"delay_ms": 20},
    "0.2 ms, 1 % loss": {"delay_ms": 0.2, "loss": 0.01},
    "100 Mbit/s": {"rate_mbit": 100},
}
PEERS = {
    "torch": "torch_peers:torch_under_ddp",
    "jax": "programs:data_parallel_of_workers",
    "tensorflow": "tensorflow_peers:native_loop_of_workers",
}
OURS = {
    "fit": "network.worker:fit",
    "with a callback for epochs": "network.worker:fit_with_callback",
    "for batches": "network.worker:fit_with_reader",
}
MACHINES = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args()
    backend = keras.backend.backend()
    programs = {"peer": PEERS[backend], **OURS}
    figures: dict[str, dict[str, float]] = {}
    with starter_for(backend, MACHINES) as starter:
        for link in options.links:
            figures[link] = {}
            for name, program in programs.items():
                with (
                    simulated_machines(MACHINES, **LINKS[link]) as machines,
                    WorkerRunner(
                        MACHINES, timeout_seconds=300, starter=starter
                    ) as runner,
                ):
                    times = runner.run(worker.time_step, program, machines)
                milliseconds = figures[link][name] = 1e3 * max(times)
                ratio = milliseconds / figures[link]["peer"]
                line = f"{backend}, {link}, {name}: {milliseconds:.1f} ms, {ratio:.2f}"
                print(line, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
