"""Cost of audits, and of steps that cannot be split by rows, beside one device.

    KERAS_BACKEND=torch python -m benchmarks.whole_steps [NAME ...]

Prints the CPU time of a repeated audit relative to an epoch of 100 steps, on two
replicas. Then, for programs of the conformance suite, it prints which remedy `fit` has
found, and the CPU time of a step on two replicas relative to plain Keras on one device.
"""

import statistics
import sys
import time

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.tables import markdown
from conformance.program import Program, select
from keras_strategy.audit.policy import RowPolicy, kinds_that_run_whole

ROUNDS, BATCHES, ROWS_PER_BATCH = 9, 20, 120
NAMES = [
    *("standardization_over_the_batch", "add_loss_of_a_sum", "contrastive"),
    *("correlation", "factorization_that_sums", "mixture_of_experts"),
    *("retrieval", "gradients_clipped_in_the_step", "loss_that_sums_in_the_step"),
]


def measure(program: Program, strategy: ks.Strategy) -> str:
    """Train on one device and on replicas in turn, and describe remedy and cost."""
    data = program.data(BATCHES * ROWS_PER_BATCH)

    def train(model):
        start = time.process_time()
        options = {"batch_size": ROWS_PER_BATCH, "verbose": 0}
        model.fit(data.x, data.y, sample_weight=data.sample_weight, **options)
        return time.process_time() - start

    alone = program.build()
    with strategy.scope():
        model = program.build()
    for warmed_up in (alone, model, alone, model):
        train(warmed_up)
    ratios = [train(model) / train(alone) for _ in range(ROUNDS)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    remedy = "whole" if "train" in kinds_that_run_whole(model) else "gathered or split"
    return f"| {program.name} | {remedy} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def measure_audits(strategy: ks.Strategy) -> str:
    """Train with a loss of the user's, and describe the cost of repeated audits."""
    audits: list[float] = []
    audit = RowPolicy.audit

    def timed_audit(self, batch):
        start = time.process_time()
        audit(self, batch)
        audits.append(time.process_time() - start)

    RowPolicy.audit = timed_audit
    categorical = keras.losses.sparse_categorical_crossentropy
    with strategy.scope():
        sizes = keras.layers.Dense(128, "relu"), keras.layers.Dense(128, "relu")
        output = keras.layers.Dense(10, "softmax")
        model = keras.Sequential([keras.Input((32,)), *sizes, output])
        model.compile("adam", lambda y, p: categorical(y, p), metrics=["accuracy"])
    x, y = np.random.default_rng(0).random((6400, 32), "float32"), np.arange(6400) % 10
    start = time.process_time()
    model.fit(x, y, batch_size=64, epochs=9, verbose=0)
    epoch = (time.process_time() - start - sum(audits)) / 9
    again = statistics.median(audits[1:])
    return f"| a repeated audit | of an epoch | {again / epoch:.3f} ({again:.3f} s) |"


if __name__ == "__main__":
    ks.config.set_logical_devices("cpu", 2)
    two = ks.MirroredStrategy()
    columns = f"program, {keras.backend.backend()}", "computed", "CPU time"
    print(markdown(columns, []))
    print(measure_audits(two))
    for chosen in select(sys.argv[1:] or NAMES):
        print(measure(chosen, two), flush=True)
