"""A replica that is the only one of its process; on torch it writes at once."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.core.context import distributed_replica
from keras_strategy.core.per_replica_attributes import current_attributes
from keras_strategy.testing import WorkerFailed, WorkerRunner
from tests.distributed.jobs import digits, in_charge, weights
from tests.distributed.test_training import equal

EAGER = ks.RunOptions(compile=False)


def runs_that_fail() -> dict:
    """Return the state before and after runs that fail."""
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
    """Return results of runs after a later run has written to their variables."""
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
    """Return an optimizer's slots of gradients after it has received others."""
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
    """Return the errors of failed steps of `fit`, and the state they leave."""
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
    """Return the number of rows that each loop over an array reads, by its kind."""
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


BACKEND = keras.backend.backend()
ON_TORCH = BACKEND == "torch"
for_torch = pytest.mark.skipif(not ON_TORCH, reason="elsewhere a step is compiled")


# Jobs whose result equals that of one process alone.
TRAINED = [adversaries]
if ON_TORCH:
    TRAINED += [a_cleared_session, kept_gradients]
WORKED = [*TRAINED, values_of_runs]
if BACKEND != "tensorflow":  # where a run that fails says that this stays assigned
    WORKED.append(runs_that_fail)
if ON_TORCH:
    WORKED += [steps_that_fail, sums_of_all_kinds, rows_that_are_read]


@pytest.fixture(scope="module")
def results(in_turns):
    """Return each worker's results, by the name of the job."""
    return in_turns(**{job.__name__: (job, {}) for job in WORKED})[0]


@pytest.mark.full(keep_on="torch")
@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="a run that fails says that this stays assigned"
)
def test_failed_run_changes_nothing(results):
    for result in results["runs_that_fail"]:
        boom, *others = result["said"]
        assert boom == "boom"
        if ON_TORCH:
            # As in replicas that are not the only one of their process.
            assert "create a variable while in a stateless scope" in others[0]
        for before, after in zip(result["before"], result["after"], strict=True):
            np.testing.assert_array_equal(before, after)
        kept, kept_after = result["kept"]
        # torch's only replica of a process does not compare the contents of lists.
        assert kept_after == ([*kept, 2] if ON_TORCH else kept)
        returned, still, total = result["returned"]
        assert (returned, still, total) == (2.0, 2.0, 4.0)


def test_returned_values_do_not_change(results):
    for result in results["values_of_runs"]:
        assert set(result["kept"].values()) == {2.0}
        assert (result["total"], result["part"]) == (4.0, 2.0)
        assert result["written"] == 6.0
        assert not result["turn"]  # nothing that is set on a layer is noted any more


def test_first_read_of_foreign_on_read_sum(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        if BACKEND == "tensorflow":  # it cannot be split any more
            with pytest.raises(WorkerFailed, match="'foreign:0' was created outside"):
                runner.run(foreign_sums_that_are_read)
            return
        for result in runner.run(foreign_sums_that_are_read):
            assert result == [7.0, 2.5, 5.0]  # each has half of the 5, and adds 1


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("job", TRAINED, ids=lambda job: job.__name__)
def test_workers_equal_one_process(job, results):
    expected = job(alone=True)
    for result in results[job.__name__]:
        assert equal(result, expected)


@for_torch
def test_failing_steps_change_nothing(results):
    for result in results["steps_that_fail"]:
        before, after, sums = result["said"]
        assert before[0] == "before" and after[0] == "after"
        assert not any("partly updated" in note for note in before)
        assert any("partly updated" in note for note in after)
        assert "had read it" in sums[0]
        # What comes before the optimizer is undone; what comes after it too.
        assert result["steps"] == [1.0] * 4


@for_torch
def test_all_kinds_of_reductions(results):
    thirds = np.full((2,), 1 / 3)
    for whole, mixed, alike in results["sums_of_all_kinds"]:
        assert equal(whole, [[4], [4]], 1e-7)
        assert equal(mixed, [[1.0], thirds] * 2, 1e-7)
        assert equal(alike, [thirds] * 4, 1e-7)


@for_torch
def test_worker_reads_its_local_rows(results):
    results = results["rows_that_are_read"]
    # Of 29 rows by 8, the last batch has 3 for the first worker and 2 for the second.
    for own, read in zip((15, 14), results, strict=True):
        assert read == {
            "built": 8 + own,  # Keras builds a model with a whole batch
            "fit": 2 * own,
            "in order": own,
            "evaluate": own,
            "predict": own,
        }
