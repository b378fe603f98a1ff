"""Measurements of one worker for the model of a step."""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.cases import CASES

# Bytes of the arrays that are summed.
SIZES = (4_096, 65_536, 1_048_576, 4_194_304)
MEASURED = ("transformer", "embedding")
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()

    if options.workers > 1:
        strategy = ks.MultiWorkerMirroredStrategy()
        chief = strategy.extended.cluster.is_chief
    else:
        strategy = ks.OneDeviceStrategy("cpu:0")
        chief = True
    results = {
        "steps": {
            case.name: {
                "seconds": _step(strategy, case),
                "gradients": _bytes_of_weights(case.build()),
            }
            for case in CASES
            if case.name in MEASURED
        },
        "all_reduce": {str(n): measure_all_reduce(strategy, n) for n in SIZES},
    }
    if chief:
        with open(options.out, "w") as file:
            json.dump(results, file)


def _bytes_of_weights(model: keras.Model) -> int:
    return sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)


def time_call(
    call: Callable[[int], object], few: int, many: int, rounds: int = ROUNDS
) -> float:
    """Seconds of one of the calls, without what does not depend on their number."""
    call(few), call(many)
    differences = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call(few)
        middle = time.perf_counter()
        call(many)
        end = time.perf_counter()
        differences.append(((end - middle) - (middle - begin)) / (many - few))
    return statistics.median(differences)


def _step(strategy: ks.Strategy, case) -> float:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.compiled()
    batch = case.batch * strategy.num_replicas_in_sync

    def fit(steps):
        x, y = case.rows(steps * batch)
        model.fit(x, y, batch_size=batch, verbose=0)

    return time_call(fit, 5, 25)


def measure_all_reduce(strategy: ks.Strategy, size: int) -> float:
    """Return the seconds of a sum over the workers of an array of so many bytes."""
    if strategy.num_replicas_in_sync == 1:
        return 0.0
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(size // 4, "float32")
    )

    def summed(x):
        return ks.get_replica_context().all_reduce("SUM", x)

    def same(x):
        return x * 1.0

    def runs(function):
        def call(count):
            for _ in range(count):
                result = strategy.run(function, args=(values,))
            # Waits for the device.
            return keras.ops.convert_to_numpy(
                strategy.experimental_local_results(result)[0]
            )

        return call

    return time_call(runs(summed), 5, 25) - time_call(runs(same), 5, 25)


if __name__ == "__main__":
    main()
