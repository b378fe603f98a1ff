"""What a replica does that is the only one of its process: functions that workers call.

On torch it writes to the variables themselves. See `jobs.py` for what these return.
"""

from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from keras_strategy.core.context import distributed_replica
from keras_strategy.core.per_replica_attributes import current_attributes
from tests.distributed.jobs import digits, in_charge, weights

EAGER = ks.RunOptions(compile=False)


def runs_that_fail() -> dict:
    """What runs that fail change, and what those before them gave."""
    strategy = ks.MultiWorkerMirroredStrategy()
    x, y = digits(6)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        adam = keras.optimizers.Adam(0.1, use_ema=True)
        adam.build(model.trainable_variables)
        total = keras.Variable(0.0, aggregation="sum")
        parts = keras.Variable(
            4.0, aggregation="sum", synchronization="on_read", trainable=False
        )
        mean = keras.metrics.Mean()
        model.kept = [1]

    def step():
        def loss_fn():
            return keras.ops.mean(keras.ops.square(model(x)))

        loss, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)()
        adam.apply(gradients, model.trainable_variables)
        total.assign_add(1.0)
        parts.assign_add(1.0)
        mean.update_state(loss)
        model.kept.append(2)
        return total.value

    def fail():
        step()
        raise ArithmeticError("boom")

    def make():
        return keras.Variable(1.0).value

    def state():
        variables = [*model.variables, *adam.variables, *mean.variables, total, parts]
        return [keras.ops.convert_to_numpy(v) for v in variables]

    def first(value):
        return float(strategy.experimental_local_results(value)[0])

    given = strategy.run(step, options=EAGER)
    before, kept, returned = state(), list(model.kept), first(given)
    said = []
    for fn in (fail, make):
        try:
            strategy.run(fn, options=EAGER)
        except Exception as error:
            said.append(str(error))
    after, kept_after = state(), list(model.kept)
    strategy.run(step, options=EAGER)
    return {
        "replicas": strategy.num_replicas_in_sync,
        "said": said,
        "before": before,
        "after": after,
        "kept": (kept, kept_after),
        "returned": (returned, first(given), float(total)),
    }


def adversaries(alone: bool = False) -> list[np.ndarray]:
    """Two models that train against each other, with optimizers of their own.

    One of them accumulates and clips, the other has a frozen layer; and the numbers of
    rows differ from step to step.
    """
    keras.utils.set_random_seed(17)
    strategy, _ = in_charge(alone)
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    layers, optimizers = keras.layers, keras.optimizers
    with strategy.scope():
        maker = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(3)]
        )
        maker.layers[0].trainable = False
        judge = keras.Sequential(
            [keras.Input((3,)), layers.Dense(3, "tanh"), layers.Dense(1)]
        )
        by_maker = optimizers.SGD(0.1, momentum=0.9)
        by_judge = optimizers.Adam(
            0.01, global_clipnorm=0.1, gradient_accumulation_steps=2
        )
        by_maker.build(maker.trainable_variables)
        by_judge.build(judge.trainable_variables)
    x, y = digits(29)
    one_hot = np.eye(3, dtype="float32")[y]
    batches = [(x[i : i + 8], one_hot[i : i + 8]) for i in range(0, 29, 8)]

    def step(x, real, rows):
        def judged():
            wrong = keras.ops.sum(keras.ops.softplus(judge(maker(x))))
            return (wrong + keras.ops.sum(keras.ops.softplus(-judge(real)))) / rows

        def made():
            return keras.ops.sum(keras.ops.softplus(-judge(maker(x)))) / rows

        for optimizer, model, loss in (
            (by_judge, judge, judged),
            (by_maker, maker, made),
        ):
            variables = model.trainable_variables
            _, gradients = ks.value_and_grad(loss, variables)()
            optimizer.apply(gradients, variables)

    distributed = strategy.experimental_distribute_dataset(batches)
    for (x, real), batch in zip(distributed, batches, strict=True):
        strategy.run(step, args=(x, real, float(len(batch[0]))))
    everything = (maker, judge, by_maker, by_judge)
    return [
        keras.ops.convert_to_numpy(v) for owner in everything for v in owner.variables
    ]


def values_of_runs() -> dict:
    """What runs return, when a later run has written to what it was read from."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        parts = keras.Variable(
            4.0, aggregation="sum", synchronization="on_read", trainable=False
        )
        written = keras.Variable(
            4.0, aggregation="sum", synchronization="on_read", trainable=False
        )
        total = keras.Variable(
            np.zeros((3,), "float32"), aggregation="sum", trainable=False
        )

    def write(strategy):
        written.assign(6.0)

    def step():
        ks.get_replica_context().merge_call(write)
        total.assign_add(keras.ops.ones((3,)))
        value = total.value
        array = value.detach().numpy() if hasattr(value, "detach") else 2.0
        return {"value": value, "rows": value[1:], "array": array}

    def first(value):
        local = strategy.experimental_local_results(value)[0]
        return float(np.max(keras.ops.convert_to_numpy(local)))

    given = strategy.run(step, options=EAGER)
    strategy.run(step, options=EAGER)
    return {
        "kept": {key: first(value) for key, value in given.items()},
        "total": float(np.max(keras.ops.convert_to_numpy(total))),
        "part": first(strategy.run(lambda: parts, options=EAGER)),
        "written": float(written),
        "turn": current_attributes() is not None,
    }


class OwnStep(keras.Model):
    """Counts its steps, and returns the result of a metric of its own.

    Attributes:
        fails: Whether a step fails "before" or "after" the optimizer's part.
        sums: Whether it assigns a sum that it has read.
        loses: Whether a replica but the first computes with what is no number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.steps = self.add_weight(
            shape=(),
            initializer="zeros",
            trainable=False,
            aggregation="only_first_replica",
        )
        self.sum = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )
        self.fails, self.sums, self.loses = "", False, False

    def call(self, x: Any) -> Any:
        """A linear function."""
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        """As Keras's, and more."""
        self.steps.assign_add(1.0)
        total = self.sum + 1.0
        if self.sums:
            self.sum.assign(total)
        replica = ks.get_replica_context()
        if self.loses and replica is not None and replica.replica_id_in_sync_group:
            x, y = data
            data = x * float("nan"), y
        if self.fails == "before":
            raise ArithmeticError("before")
        logs = super().train_step(data)
        if self.fails == "after":
            raise ArithmeticError("after")
        return {"loss": logs["loss"], **self.test_step(data)}

    def test_step(self, data: Any) -> Any:
        """Counts the errors."""
        x, y = data
        self.error.update_state(y, self(x))
        # No metric has this name: what is returned counts, and not what is asked later.
        return {"returned": self.error.result()}


class Keeps(keras.optimizers.Optimizer):
    """Gradient descent that keeps what it is given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: list[Any] = []

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Goes down."""
        self.kept.append(gradient)
        self.assign_sub(variable, gradient * keras.ops.cast(learning_rate, "float32"))


def regression(rows: int = 13) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 6 numbers, and one for each."""
    x, y = digits(rows)
    return x, y[:, None].astype("float32")


def a_cleared_session(alone: bool = False) -> list:
    """Trains a model that was made when its scope had cleared Keras's session."""
    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    with scope:
        keras.utils.clear_session()
        model = OwnStep()
        model.compile(Keeps(learning_rate=0.1), "mse", run_eagerly=True)
    x, y = regression()
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [history.history, weights(model)]


def kept_gradients(alone: bool = False) -> list:
    """What an optimizer keeps of the gradients, when it has been given others."""
    keras.utils.set_random_seed(17)
    _, scope = in_charge(alone)
    with scope:
        model = OwnStep()
        model.compile(Keeps(learning_rate=0.1), "mse", run_eagerly=True)
    x, y = regression()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.loses = True  # where there are no rows
    model.fit(x[:1], y[:1], verbose=0)
    return [keras.ops.convert_to_numpy(kept) for kept in model.optimizer.kept]


def steps_that_fail() -> dict:
    """What is said of steps of `fit` that fail, and what they change."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.Adam(0.1), "mse")
    x, y = regression(4)
    model.fit(x, y, batch_size=4, verbose=0)
    steps, said = [float(model.steps)], []
    for fails, sums in (("before", False), ("after", False), ("", True)):
        model.fails, model.sums = fails, sums
        try:
            model.fit(x, y, batch_size=4, verbose=0)
        except (ArithmeticError, ValueError) as error:
            said.append([str(error), *getattr(error, "__notes__", [])])
        steps.append(float(model.steps))
    # One that left would be what the last failure of the other is put down to.
    model.sums = False
    model.fit(x, y, batch_size=4, verbose=0)
    return {"said": said, "steps": steps}


def sums_of_all_kinds() -> list[list]:
    """Weighted sums of whole numbers, of several kinds of floats, and of arrays."""
    strategy = ks.MultiWorkerMirroredStrategy()
    thirds = np.full((2,), 1 / 3, "float32")
    kinds = ([np.int32([4])], [np.float16([1]), thirds], [thirds, thirds])

    def sums(parts):
        replica = distributed_replica()
        assert replica is not None
        tensors = [keras.ops.convert_to_tensor(part) for part in parts]
        alike = replica.weighted_sum(tensors, 0.5)
        arrays = replica.weighted_sum(parts, 0.5)
        return [keras.ops.convert_to_numpy(x) for x in (*alike, *arrays)]

    results = [strategy.run(lambda parts=parts: sums(parts)) for parts in kinds]
    local = strategy.experimental_local_results
    return [[local(total)[0] for total in totals] for totals in results]


def rows_that_are_read() -> dict:
    """How many rows of an array each loop over it reads, by what it is."""
    import torch

    class Counted(torch.Tensor):
        """Rows that count how often one of them is read."""

        read = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            if func is torch.Tensor.__getitem__:
                Counted.read += len(result)
                return result.as_subclass(torch.Tensor)
            return result

    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    x, y = digits(29)
    x = torch.from_numpy(x).as_subclass(Counted)
    y = np.eye(3, dtype="float32")[y]
    read = {}
    for name, loop in {
        "built": lambda: model.fit(x, y, batch_size=8, verbose=0),
        "fit": lambda: model.fit(x, y, batch_size=8, epochs=2, verbose=0),
        "in order": lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": lambda: model.predict(x, batch_size=8, verbose=0),
    }.items():
        Counted.read = 0
        loop()
        read[name] = Counted.read
    return read


def foreign_sums_that_are_read() -> list[float]:
    """Sums of no strategy whose first use is a read in `run`, and another one."""
    strategy = ks.MultiWorkerMirroredStrategy()
    kind = {"aggregation": "sum", "synchronization": "on_read", "trainable": False}
    assigned = keras.Variable(5.0, name="foreign", **kind)
    strategy.run(lambda: assigned.assign(assigned + 1.0))
    read = keras.Variable(5.0, **kind)
    local = strategy.experimental_local_results(strategy.run(lambda: read + 0.0))[0]
    return [float(keras.ops.convert_to_numpy(x)) for x in (assigned, local, read)]
