"""What workers do in the tests of the TensorFlow adapter. See jobs.py."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_strategy as ks
from tests.distributed.jobs import digits, in_charge, weights
from tests.speed import counts_tensorflow


def fit_in_many_ways(alone: bool = False) -> dict:
    """Trains on sparse gradients, several steps at once, tf.data and generators."""
    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    rng = np.random.default_rng(0)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(20, 5),
                keras.layers.Flatten(),
                # A bias would have no gradient but rounding, which Adam magnifies.
                keras.layers.Dense(3, use_bias=False),
                keras.layers.BatchNormalization(synchronized=not alone),
            ]
        )
        model.compile(
            keras.optimizers.Adam(
                0.01,
                gradient_accumulation_steps=2,
                use_ema=True,
                ema_overwrite_frequency=2,
            ),
            "mse",
            metrics=["mae"],
            steps_per_execution=3,
        )
    x = rng.integers(0, 20, size=(29, 4)).astype("int32")
    y = rng.normal(size=(29, 3)).astype("float32")

    def batches():
        for begin in range(0, 29, 8):
            yield x[begin : begin + 8], y[begin : begin + 8]

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    histories = [
        model.fit(x, y, batch_size=8, epochs=2, verbose=0).history,
        model.fit(dataset, verbose=0).history,
        model.fit(batches(), verbose=0).history,
    ]
    return {
        "histories": histories,
        "weights": weights(model),
        "evaluated": model.evaluate(dataset, verbose=0),
        "predicted": model.predict(dataset, verbose=0),
        "on_batch": model.predict_on_batch(x[:3]),
    }


def shuffle_without_a_seed() -> tuple[np.ndarray, list[int]]:
    """The order in which tf.data shuffles where nobody has set a seed.

    And how often Dropout draws in two epochs, of known length and of unknown.
    """
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
    rows = np.arange(40, dtype="float32")[:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(40).batch(8)
    order = model.predict(dataset, verbose=0)
    drawn = []
    for length in (5, None):
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5)
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1), dropout]
            )
            model.compile("sgd", "mse")
        data = dataset.map(lambda x: (x, x))
        if length is None:
            data = data.filter(lambda x, y: True)
        model.fit(data, epochs=2, verbose=0)
        drawn.append(int(dropout.seed_generator.state.numpy()[1]))
    return order, drawn


def loops_in_functions(alone: bool = False) -> dict:
    """Collectives in a loop that TensorFlow runs, over a distributed dataset."""
    strategy, _ = in_charge(alone)
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    x, y = digits(29)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def loop(batches):
        total = tf.zeros(())
        for rows, _ in batches:
            step = strategy.run(
                lambda rows: ks.get_replica_context().all_reduce(
                    "sum", tf.reduce_sum(rows)
                ),
                args=(rows,),
            )
            total += strategy.reduce("mean", step)
        return total

    return {
        "python": [
            float(strategy.reduce("sum", rows, axis=0)[0]) for rows, _ in distributed
        ],
        "function": float(loop(distributed)),
    }


def variables_and_dtypes() -> dict:
    """What is read of on_read variables, and the dtypes that travel."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = {
            aggregation: keras.Variable(
                1.0, synchronization="on_read", aggregation=aggregation
            )
            for aggregation in ("sum", "mean", "only_first_replica")
        }
        seeded = keras.Variable(keras.random.normal((2,)))

    def step():
        native = tf.distribute.get_replica_context()
        for variable in variables.values():
            number = ks.get_replica_context().replica_id_in_sync_group
            variable.assign(keras.ops.cast(number, "float32") + 5.0)
        return native.all_reduce("sum", tf.ones(()))

    native = strategy.run(step)
    result: dict[str, Any] = {name: float(v) for name, v in variables.items()}
    result["native"] = float(strategy.experimental_local_results(native)[0])
    result["seeded"] = keras.ops.convert_to_numpy(seeded)
    for dtype in ("bool", "int8", "uint32", "uint64", "bfloat16", "complex64"):
        ones = strategy.run(lambda dtype=dtype: tf.cast(tf.ones((2,)), dtype))
        gathered = strategy.gather(ones, 0)
        summed = None if dtype == "bool" else strategy.reduce("sum", ones)
        result[dtype] = (
            gathered.dtype.name,
            [complex(tf.cast(value, tf.complex64)) for value in gathered],
            None if summed is None else complex(tf.cast(summed[0], tf.complex64)),
        )
    result["scalars"] = {}
    for dtype, value in SCALARS.items():
        scalar = tf.constant(value[strategy.extended.local_replicas.start], dtype)
        for name, fn in (("run", _sum_over_replicas), ("reduce", tf.identity)):
            given = strategy.run(fn, args=(scalar,))
            if name == "reduce":
                given = strategy.reduce("sum", given)
            else:
                (given,) = strategy.experimental_local_results(given)
            result["scalars"][name, dtype] = given.numpy().item()

    def sums(steps):
        for _ in range(steps):
            strategy.run(_sum_over_replicas, args=(tf.ones(()),))

    result["collectives"], *_ = counts_tensorflow.count(sums, 4)
    return result


# Two workers' numbers, of which each bit counts, by their dtypes.
SCALARS = {
    "float32": (3.14159265, 2.7e-5),
    "float64": (3.14159265, float("nan")),
    "int32": (-7, 2**31 - 1),
    "int64": (-(2**40) - 1, 5),
    "uint8": (200, 55),
    "uint64": (2**63, 5),
    "float16": (1.5, -3.0),
}


def _sum_over_replicas(value):
    return ks.get_replica_context().all_reduce("sum", value)


def reduce_after_run(strategy: ks.Strategy | None = None) -> list[list[float]]:
    """Reduce other outputs in each step, and return their sums, means and collectives.

    With the number of collectives that a call of `reduce` executed itself.
    """
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    group, compute = strategy.extended.group, strategy.extended.group.compute_reduce
    executed = []

    def counted(*args):
        executed.append(tf.executing_eagerly())
        return compute(*args)

    group.compute_reduce = counted

    def step(x, count):
        first = tf.cast(ks.get_replica_context().replica_id_in_sync_group, x.dtype)
        outputs = {"loss": x + first, "rows": tf.stack([x, x])}
        return outputs | {f"more {i}": 10 * x + first for i in range(count)}

    steps: list[tuple[int, list[tuple[str, str]]]] = [
        (1, [("loss", "sum")]),
        (1, [("loss", "sum"), ("more 0", "mean")]),
        (1, [("more 0", "mean"), ("loss", "sum"), ("rows", "sum")]),
        (1, [("more 0", "sum"), ("loss", "sum"), ("loss", "sum")]),
        (0, [("loss", "mean")]),  # fewer outputs
        (0, []),
        (0, [("loss", "mean")]),
    ]
    results = []
    for number, (count, reductions) in enumerate(steps):
        outputs = strategy.run(step, (tf.constant(float(number)), count))
        executed.clear()
        results.append(
            [
                float(tf.reduce_sum(strategy.reduce(op, outputs[name])))
                for name, op in reductions
            ]
        )
        results[-1].append(sum(executed))
    del group.compute_reduce
    return results


# With two replicas: the first adds 0, the second 1. Behind them the collectives.
REDUCED_AFTER_RUN = [
    [1.0, 1],
    [3.0, 10.5, 1],
    [20.5, 5.0, 8.0, 1],
    [61.0, 7.0, 7.0, 2],
    [4.5, 1],
    [0],
    [6.5, 1],
]


def gradient_through_collectives() -> list[float]:
    """The gradient of what all replicas gather and sum of this one's 2."""
    strategy = ks.MultiWorkerMirroredStrategy()

    def step():
        replica = ks.get_replica_context()
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = replica.all_gather(tf.reshape(x * x, (1,)), axis=0)
            y = tf.reduce_sum(rows) + replica.all_reduce("sum", x)
        return tape.gradient(y, x)

    gradients = strategy.run(step)
    return [float(g) for g in strategy.experimental_local_results(gradients)]


def different_values_in_a_run() -> list[str]:
    """Collectives, in a compiled function, of values that do not fit together."""
    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0

    def reduce():
        return ks.get_replica_context().all_reduce("sum", tf.ones((2 + last,)))

    def gather():
        return ks.get_replica_context().all_gather(tf.ones((2, 2 + last)), axis=0)

    def one_or_the_other():
        context = ks.get_replica_context()
        if last:
            return context.all_reduce("sum", tf.ones((2,)))
        return context.all_gather(tf.ones((2,)), axis=0)

    def dtypes():
        one = tf.ones((), tf.int64 if last else tf.float32)
        return ks.get_replica_context().all_reduce("sum", one)

    def ranks():
        return ks.get_replica_context().all_reduce("sum", tf.ones((1,) if last else ()))

    said = []
    for fn in (reduce, gather, one_or_the_other, dtypes, ranks):
        try:
            strategy.run(fn)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    # Later collectives work.
    ones = strategy.run(lambda: ks.get_replica_context().all_reduce("sum", tf.ones(())))
    assert float(strategy.experimental_local_results(ones)[0]) == 2.0
    return said


def after_other_use() -> str:
    """A strategy that is made when TensorFlow's devices are in use already."""
    keras.ops.ones((2,))
    try:
        ks.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        return str(error)
    return "no error"


def gradients_of_other_shapes() -> str:
    """What is said where workers apply gradients that do not fit together."""
    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(shape)) for shape in ((2, 3), (6,))]
        optimizer = keras.optimizers.SGD()
        optimizer.build(variables)

    def step():
        # As many numbers on each worker.
        variable = variables[last]
        optimizer.apply([tf.ones_like(variable.value)], [variable])

    try:
        strategy.run(step)
    except ValueError as error:
        return str(error)
    return "no error"
