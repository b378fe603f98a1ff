"""Memory of a model of 50 million parameters on each device, by sharding.

`KERAS_BACKEND=jax python -m benchmarks.memory`, and with `--call run` for a step that
`strategy.run` calls instead of one of `fit`. The variables' bytes are those of their
arrays; what the program of a step takes, and what travels, XLA's compiler says. On
torch and TensorFlow it is measured in a process for each device, see
`benchmarks.memory_torch` and `benchmarks.memory_tensorflow`.
"""

import argparse
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

WIDTH, LAYERS, ROWS = 3536, 4, 64
_KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all"
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


class Traffic(NamedTuple):
    """Collectives of one kind in a step.

    Attributes:
        kind: What they are called.
        count: How many there are.
        sent: The bytes that each device sends for them at least.
    """

    kind: str
    count: int
    sent: float


def collectives(text: str, devices: int) -> list[Traffic]:
    """Return the collectives of a compiled program.

    Args:
        text: The program, as XLA writes it.
        devices: How many devices it is for.
    """
    # Of the result's bytes, as a ring sends them.
    share = (devices - 1) / devices
    sent = {
        "all-reduce": 2 * share,
        "reduce-scatter": devices - 1,
        "all-gather": share,
        "all-to-all": share,
    }
    found = [(kind, _bytes(result)) for result, kind in _CALL.findall(text)]
    return [
        Traffic(kind, len(sizes), sent[kind] * sum(sizes))
        for kind in _KINDS
        if (sizes := [size for name, size in found if name == kind])
    ]


def _bytes(result: str) -> int:
    return sum(
        int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
        for bits, shape in _ARRAY.findall(result)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="of the layers")
    parser.add_argument(
        "--call", choices=["fit", "run"], default="fit", help="what trains, on JAX"
    )
    options = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if os.environ["KERAS_BACKEND"] != "jax":
        _of_workers(options.width, os.environ["KERAS_BACKEND"])
        return
    print(
        "| N | `shard` | parameters | slots | program: arguments | temporaries "
        "| most at once | collectives of a step | sent by each device |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for replicas, shard, report, memory, traffic in _measured(
        options.width, options.call
    ):
        kinds = ", ".join(f"{t.count} {t.kind}" for t in traffic) or "none"
        # What it writes where an argument was is there once.
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        given, working = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        print(
            f"| {replicas} | {shard or 'None'} | {_mega(report.parameters[0])} | "
            f"{_mega(report.slots[0])} | {_mega(given)} | {_mega(working)} | "
            f"{_mega(given + working + results)} | {kinds} | "
            f"{_mega(sum(t.sent for t in traffic))} |",
            flush=True,
        )


class Found(NamedTuple):
    """Measurements of one process.

    Attributes:
        parameters: The bytes of what is trained.
        slots: Those of what the optimizer keeps.
        most: The most bytes at once.
        sent: How many collectives a step has of each kind, and the bytes that this
            process sends for them.
    """

    parameters: int
    slots: int
    most: int
    sent: dict[str, tuple[int, float]]


def _of_workers(width: int, backend: str) -> None:
    """Print the table where each device has a process."""
    from keras_strategy.core.registry import get_engine
    from keras_strategy.testing import WorkerRunner

    of_worker = importlib.import_module(f"benchmarks.memory_{backend}").of_worker
    print(
        "| N | `shard` | parameters | slots | most at once "
        "| collectives of a step | sent by each device |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    shards = [None, "optimizer"]
    if get_engine().sharding_unsupported_reason("parameters") is None:
        shards.append("parameters")
    for workers in (1, 2, 4, 8):
        for shard in shards if workers > 1 else (None,):
            with WorkerRunner(workers, timeout_seconds=900) as runner:
                of_each = runner.run(of_worker, width, shard)
            found = max(of_each, key=lambda one: one.most)
            kinds = ", ".join(f"{n} {kind}" for kind, (n, _) in found.sent.items())
            print(
                f"| {workers} | {shard or 'None'} | {_mega(found.parameters)} | "
                f"{_mega(max(one.slots for one in of_each))} | {_mega(found.most)} | "
                f"{kinds or 'none'} | "
                f"{_mega(sum(size for _, size in found.sent.values()))} |",
                flush=True,
            )


def trained(width: int, shard: str | None, counter: Callable[[], Any]) -> tuple:
    """Train two steps of one batch in one of several processes.

    Args:
        width: Of the layers.
        shard: What is split.
        counter: Counts, from when it is called, what is sent.

    Returns:
        The strategy's report, and what `counter` counted of the second step.
    """
    import keras
    import numpy as np

    import keras_strategy as ks

    strategy = ks.MultiWorkerMirroredStrategy(shard=shard)
    with strategy.scope():
        dense = [keras.layers.Dense(width, "tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((width,)), *dense])
        model.compile(keras.optimizers.Adam(), "mse")
    batch = np.zeros((ROWS, width), "float32")
    model.fit(batch, batch, batch_size=ROWS, verbose=0)
    sent = counter()
    model.fit(batch, batch, batch_size=ROWS, verbose=0)
    return strategy.memory_report(model), dict(sent)


def _mega(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def _measured(width: int, call: str) -> Iterator[tuple]:
    import keras

    import keras_strategy as ks

    ks.config.set_logical_devices("cpu", 4)
    for replicas in (1, 2, 4) if call == "fit" else (2, 4):
        for shard in (None, "optimizer", "parameters") if replicas > 1 else (None,):
            cpus = [f"cpu:{i}" for i in range(replicas)]
            strategy = ks.MirroredStrategy(cpus, shard=shard)
            with strategy.scope():
                dense = [keras.layers.Dense(width, "tanh") for _ in range(LAYERS)]
                model = keras.Sequential([keras.Input((width,)), *dense])
                model.compile(keras.optimizers.Adam(), "mse")
                model.optimizer.build(model.trainable_variables)
                if call == "fit":
                    program = program_of_fit(model, width)
                    text, memory = program.as_text(), program.memory_analysis()
            if call == "run":
                text, memory = _of_run(strategy, model, width)
            report = strategy.memory_report(model)
            yield replicas, shard, report, memory, collectives(text, replicas)


def _of_run(strategy: Any, model: Any, width: int) -> tuple[str, Any]:
    """Return the compiler's memory analysis of a step in `strategy.run`."""
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


def program_of_fit(model: Any, width: int) -> Any:
    """Compile the step of `fit` as Keras compiles it.

    Args:
        model: A compiled model.
        width: Of its inputs and outputs.
    """
    import jax
    import keras
    import numpy as np

    model._symbolic_build(data_batch=(np.zeros((ROWS, width)), np.zeros((ROWS, width))))
    state = tuple(
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    batch = (np.zeros((ROWS, width), "float32"), np.zeros((ROWS, width), "float32"))
    distribution: Any = keras.distribution.distribution()
    if distribution is not None:
        batch = distribution.place_batch(batch)
    shardings = jax.tree.map(lambda array: array.sharding, state)
    step = jax.jit(model.train_step, out_shardings=(None, shardings), donate_argnums=0)
    return step.lower(state, batch).compile()


if __name__ == "__main__":
    main()
