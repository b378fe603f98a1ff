"""Elastic training whose workers are killed at random moments.

    KERAS_BACKEND=torch python -m tests.distributed.elastic_program --kills 50

prints how long training stops after each kill and each join, and how far the weights
are from those of a training without faults.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
ROWS, BATCH_SIZE = 330, 32  # 11 batches, the last one uneven


class Batch(NamedTuple):
    """A batch that a worker has trained on."""

    time: float
    pid: int
    workers: int
    cluster: str


def record_batch(folder: pathlib.Path, workers: int, seconds: float) -> None:
    """Append a batch to this process's file, after some seconds unless in haste."""
    if not (folder / "fast").exists():
        time.sleep(seconds)
    cluster = os.environ.get("KERAS_STRATEGY_PORT", "")  # a new one each time
    with open(folder / f"batches-{os.getpid()}", "a") as file:
        print(json.dumps(Batch(time.time(), os.getpid(), workers, cluster)), file=file)


def train(
    folder: pathlib.Path,
    epochs: int,
    seconds: float,
    virtual_replicas: int | None = None,
) -> None:
    """Train, record each batch in the folder, and save the weights there."""
    import keras

    import keras_strategy as ks

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            record_batch(folder, size, seconds)

    keras.utils.set_random_seed(1)
    strategy = ks.MultiWorkerMirroredStrategy(virtual_replicas=virtual_replicas)
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    size = len(cluster.get("worker", ["alone"]))
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((20,)),
                layers.Dense(32, "relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rows = np.random.default_rng(0).normal(size=(ROWS, 20)).astype("float32")
    backup = ks.callbacks.BackupAndRestore(folder / "backup", save_freq=1)
    model.fit(
        *(rows, rows[:, :3]),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=[Record(), backup],
    )
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    np.savez(folder / f"weights-{os.getpid()}.npz", *values)


def train_in_a_loop(folder: pathlib.Path, epochs: int, seconds: float) -> None:
    """Train in a custom loop that saves when workers join, and record each batch."""
    import keras
    from keras import ops

    import keras_strategy as ks

    keras.utils.set_random_seed(1)
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    handler = ks.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        {"model": model, "optimizer": optimizer},
        folder / "checkpoints",
    )
    rows = np.random.default_rng(0).normal(size=(ROWS, 20)).astype("float32")

    def compute_loss(x):
        errors = ops.mean(ops.square(model(x) - x[:, :3]), axis=-1)
        return ks.compute_average_loss(errors)

    def step(x):
        variables = model.trainable_variables
        _, gradients = ks.value_and_grad(compute_loss, variables)(x)
        optimizer.apply(gradients, variables)

    for number in range(handler.total_run_calls, 11 * epochs):
        begin = number % 11 * BATCH_SIZE
        (batch,) = strategy.experimental_distribute_dataset(
            [rows[begin : begin + BATCH_SIZE]]
        )
        handler.run(strategy.run, step, args=(batch,))
        record_batch(folder, strategy.num_replicas_in_sync, seconds)
    values = [ops.convert_to_numpy(variable) for variable in model.variables]
    np.savez(folder / f"weights-{os.getpid()}.npz", *values)


def read_batches(folder: pathlib.Path) -> list[Batch]:
    """Return what the workers have recorded, in the order of time."""
    batches = []
    for file in folder.glob("batches-*"):
        for line in file.read_text().splitlines():
            # A worker may be killed while it writes.
            with contextlib.suppress(ValueError):
                batches.append(Batch(*json.loads(line)))
    return sorted(batches)


def read_weights(folder: pathlib.Path) -> list[list[np.ndarray]]:
    """Return the values that each worker has ended with."""
    results = []
    for file in folder.glob("weights-*.npz"):
        with np.load(file) as saved:
            results.append([saved[name] for name in saved.files])
    return results


def largest_difference(values: list[np.ndarray], others: list[np.ndarray]) -> float:
    pairs = zip(values, others, strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def start(folder: pathlib.Path, options: list[str], *arguments: Any) -> Any:
    """Start the launcher with some options, and its output in a file."""
    command = [sys.executable, "-m", "keras_strategy", "run", *options]
    command += ["-m", "tests.distributed.elastic_program", "--folder", str(folder)]
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for_batch(folder: pathlib.Path, process: Any, condition: Any) -> Batch:
    """Wait for a batch of which a condition is true; return it."""
    while process.poll() is None:
        found = list(filter(condition, read_batches(folder)))
        if found:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError((folder / "output").read_text())


def kill_one(folder: pathlib.Path, process: Any, choose: Any) -> float:
    """Kill one of several workers, once there are as many; return the time."""
    while process.poll() is None:
        batches = read_batches(folder)
        last = batches[-1] if batches else None
        if last is not None and last.workers > 1 and time.time() - last.time < 0.5:
            pids = {b.pid for b in batches if last.time - b.time < 2}
            pid = choose(sorted(pids))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return time.time()
        time.sleep(0.05)
    raise AssertionError((folder / "output").read_text())


def measure(kills: int, workers: int, seed: int) -> None:
    generator = random.Random(seed)
    # Training has the same bits on 1, 2, 3 and 4 workers.
    program = ["--virtual-replicas", "12", "--epochs", str(4 * kills)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        options = ["--workers", str(workers), "--min-workers", "1"]
        options += ["--max-restarts", str(10 * kills)]
        process = start(folder, options, *program, "--seconds", 0.1)
        times = []
        for _ in range(kills):
            time.sleep(generator.uniform(0, 8))
            times.append(kill_one(folder, process, generator.choice))
        (folder / "fast").touch()
        status = process.wait()
        output = (folder / "output").read_text()
        batches, weights = read_batches(folder), read_weights(folder)
        print(output if status else "", f"exit status {status}")
        with tempfile.TemporaryDirectory() as other:
            subprocess.run(
                [sys.executable, "-m", "tests.distributed.elastic_program"]
                + ["--folder", other, *program],
                cwd=ROOT,
                check=True,
            )
            (expected,) = read_weights(pathlib.Path(other))
        largest = max(largest_difference(values, expected) for values in weights)
        print(f"largest difference of a variable: {largest:.1e}")
        report(batches, times, output)


def report(batches: list[Batch], times: list[float], output: str) -> None:
    """Print the sizes of the clusters, and how long training stopped."""
    sizes = re.findall(r"(\d+) of \d+ workers train", output)
    print("clusters:", " ".join(sizes))
    stops = []
    for moment in times:
        before = {b.cluster for b in batches if b.time < moment}
        after = [b for b in batches if b.time > moment and b.cluster not in before]
        stops.append(after[0].time - moment)
    joins = []
    for previous, batch in zip(batches, batches[1:], strict=False):
        is_killed = any(previous.time < moment < batch.time for moment in times)
        if batch.workers > previous.workers and not is_killed:
            joins.append(batch.time - previous.time)
    print("| training stops after a | times | median, s | longest, s |")
    print("| --- | --- | --- | --- |")
    for name, seconds in ("kill", stops), ("join", joins):
        if seconds:
            middle, longest = statistics.median(seconds), max(seconds)
            print(f"| {name} | {len(seconds)} | {middle:.2f} | {longest:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--virtual-replicas", type=int)
    parser.add_argument("--loop", action="store_true", help="train in a custom loop")
    parser.add_argument("--fail-first", type=int, help="the worker that does so once")
    options = parser.parse_args()
    if options.kills is not None:
        measure(options.kills, options.workers, options.seed)
        return

    import keras_strategy as ks

    def train_or_fail():
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        failed = options.folder / "failed"
        fails = config and config["task"]["index"] == options.fail_first
        if fails and not failed.exists():
            failed.touch()
            sys.exit(3)
        arguments = options.folder, options.epochs, options.seconds
        if options.loop:
            train_in_a_loop(*arguments)
        else:
            train(*arguments, options.virtual_replicas)

    ks.run_elastic(train_or_fail)


if __name__ == "__main__":
    main()
