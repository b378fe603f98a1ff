"""Memory of a model of 50 million parameters on each device, by sharding.

    KERAS_BACKEND=jax python -m benchmarks.memory [--call run]

On JAX the compiler reports what a step of `fit` or `run` takes, and sends. On torch and
TensorFlow a process for each device measures it: see `benchmarks.worker_memory`.
"""

import argparse
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.tables import markdown

# A step's collectives by kind: their number, and the bytes that each device sends.
Traffic = dict[str, tuple[int, float]]

# The devices, the sharding, the bytes in each column, and the collectives.
Row = tuple[int, str | None, list[float], Traffic]

WIDTH, LAYERS, ROWS = 3536, 4, 64
JAX_COLUMNS = ("arguments", "temporaries", "peak")
_KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def collectives(text: str, devices: int) -> Traffic:
    """Return the collectives of a program of so many devices, as XLA writes it."""
    # Of the result's bytes, as a ring sends them.
    share = (devices - 1) / devices
    factors = (2 * share, devices - 1, share, share)
    found = [(kind, _num_bytes(result)) for result, kind in _CALL.findall(text)]
    return {
        kind: (len(sizes), factor * sum(sizes))
        for kind, factor in zip(_KINDS, factors, strict=True)
        if (sizes := [size for name, size in found if name == kind])
    }


def _num_bytes(result: str) -> int:
    return sum(
        int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
        for bits, shape in _ARRAY.findall(result)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="of the layers")
    calls = {"choices": ["fit", "run"], "default": "fit"}
    parser.add_argument("--call", **calls, help="what trains, on JAX")
    options = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if os.environ["KERAS_BACKEND"] == "jax":
        columns, rows = JAX_COLUMNS, _measure_devices(options.width, options.call)
    else:
        columns, rows = ("peak",), _measure_workers(options.width)
    first, last = ("N", "`shard`", "parameters", "slots"), "collectives of a step"
    print(markdown((*first, *columns, last, "sent"), []))
    for count, shard, sizes, traffic in rows:
        megabytes = [f"{size / 1e6:,.0f}" for size in sizes]
        kinds = ", ".join(f"{n} {kind}" for kind, (n, _) in traffic.items()) or "none"
        sent = sum(size for _, size in traffic.values()) / 1e6
        cells = str(count), str(shard), *megabytes, kinds, f"{sent:,.0f}"
        print(f"| {' | '.join(cells)} |", flush=True)


def build_model(strategy: Any, width: int) -> Any:
    """Return the compiled model in the strategy's scope."""
    import keras

    with strategy.scope():
        dense = [keras.layers.Dense(width, "tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((width,)), *dense])
        model.compile(keras.optimizers.Adam(), "mse")
    return model


def _measure_workers(width: int) -> Iterator[Row]:
    """Yield rows of the largest sizes among processes of one device each."""
    from benchmarks.worker_memory import measure_worker
    from keras_strategy.core.registry import get_engine
    from keras_strategy.testing import WorkerRunner

    shards: list[str | None] = [None, "optimizer"]
    if get_engine().sharding_unsupported_reason("parameters") is None:
        shards.append("parameters")
    for workers in (1, 2, 4, 8):
        for shard in shards if workers > 1 else (None,):
            with WorkerRunner(workers, timeout_seconds=900) as runner:
                found = runner.run(measure_worker, width, shard)
            sizes = zip(*(sizes for sizes, _ in found), strict=True)
            yield workers, shard, list(map(max, sizes)), found[0][1]


def _measure_devices(width: int, call: str) -> Iterator[Row]:
    """Yield the rows of JAX."""
    import keras_strategy as ks

    ks.config.set_logical_devices("cpu", 4)
    for replicas in (1, 2, 4) if call == "fit" else (2, 4):
        for shard in (None, "optimizer", "parameters") if replicas > 1 else (None,):
            cpus = [f"cpu:{i}" for i in range(replicas)]
            strategy = ks.MirroredStrategy(cpus, shard=shard)
            model = build_model(strategy, width)
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
                if call == "fit":
                    program = compile_fit(model, width)
                    text, memory = program.as_text(), program.memory_analysis()
            if call == "run":
                text, memory = _compile_run(strategy, model, width)
            report = strategy.memory_report(model)
            # What it writes where an argument was is there once.
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            used = [memory.argument_size_in_bytes, memory.temp_size_in_bytes]
            sizes = [report.parameters[0], report.slots[0], *used, sum(used) + results]
            yield replicas, shard, sizes, collectives(text, replicas)


def compile_fit(model: Any, width: int) -> Any:
    """Compile the step of `fit` of such a model as Keras compiles it on JAX."""
    import jax
    import keras
    import numpy as np

    rows = np.zeros((ROWS, width), "float32")
    batch = rows, rows
    model._symbolic_build(data_batch=batch)
    kinds = model.trainable_variables, model.non_trainable_variables
    kinds += model.optimizer.variables, model.metrics_variables
    state = tuple([v.value for v in variables] for variables in kinds)
    distribution: Any = keras.distribution.distribution()
    if distribution is not None:
        batch = distribution.place_batch(batch)
    shardings = jax.tree.map(lambda array: array.sharding, state)
    step = jax.jit(model.train_step, out_shardings=(None, shardings), donate_argnums=0)
    return step.lower(state, batch).compile()


def _compile_run(strategy: Any, model: Any, width: int) -> tuple[str, Any]:
    """Return a step in `strategy.run`: its program, and the memory that it takes."""
    import jax
    import keras
    import numpy as np

    import keras_strategy as ks

    def loss_of(x, y):
        losses = keras.losses.mean_squared_error(y, model(x, training=True))
        return ks.compute_average_loss(losses, global_batch_size=ROWS)

    def step(x, y):
        gradient_of = ks.value_and_grad(loss_of, model.trainable_variables)
        loss, gradients = gradient_of(x, y)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    rows = np.zeros((ROWS, width), "float32")
    (batch,) = strategy.experimental_distribute_dataset([(rows, rows)])
    client = jax.devices()[0].client
    # They are kept: the id of one that is gone may be that of a new one.
    before = client.live_executables()
    strategy.run(step, batch)
    known = {id(program) for program in before}
    made = [x for x in client.live_executables() if id(x) not in known]
    memories = [x.get_compiled_memory_stats() for x in made]
    sizes = [memory.argument_size_in_bytes for memory in memories]
    largest = sizes.index(max(sizes))
    (module,) = made[largest].hlo_modules()
    return module.to_string(), memories[largest]


if __name__ == "__main__":
    main()
