"""Peers of the tensorflow backend: Keras and loops on native tf.distribute.

Our programs are the same, on a strategy of ours (`benchmarks.tensorflow_ours`).
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Train


def native_strategy(one_device: bool = False) -> tf.distribute.MirroredStrategy:
    """Return the native strategy of the two devices.

    Args:
        one_device: Whether to sum on one device, in place of what it chooses itself.
    """
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        tf.distribute.ReductionToOneDevice() if one_device else None,
    )


class _Steps(keras.callbacks.Callback):
    """A `fit` without end, in a thread of its own, that goes on when it is told to."""

    def __init__(self):
        super().__init__()
        self._left = 0
        self._go_on, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        while self._left <= 0:
            self._done.release()
            self._go_on.acquire()
        self._left -= self.model.steps_per_execution  # the rest counts in the next turn

    def start(self, model: keras.Model, data: tf.data.Dataset) -> None:
        def fit():
            try:
                model.fit(data, steps_per_epoch=10**9, verbose=0, callbacks=[self])
            except BaseException as error:  # for the thread that waits
                self._error = error
                self._done.release()

        threading.Thread(target=fit, daemon=True).start()
        self._wait()

    def train(self, steps: int) -> None:
        self._left += steps
        self._go_on.release()
        self._wait()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


def steps_of_fit(case: Case, strategy: Any, steps_per_execution: int = 1) -> Train:
    """Yield the steps of one endless `model.fit`, without its start.

    On a native strategy, where it makes three distributed iterators, that is as long as
    60 steps of the smallest of these models.

    Args:
        case: The model, its data and its batch size.
        strategy: Ours, or a native one.
        steps_per_execution: The argument of `compile`.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.compiled(steps_per_execution)
    x, y = case.rows(8 * case.batch)
    # As of arrays, whose batches have no fixed number of rows for Keras.
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(case.batch)
    steps = _Steps()
    steps.start(model, data)
    return steps.train


# What a replica does with its inputs and targets; gives its part of the loss.
Step = Callable[[Any, Any], Any]


def step_of_replica(case: Case) -> Step:
    """Return the step of a custom training loop; call it in a scope."""
    model, adam = case.build(), optimizer()
    adam.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_row = loss()
    per_row.reduction = "none"

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = per_row(y, logits)
            # Of 64 targets for each row of the transformer, one for the others.
            count = case.batch * (losses.shape[1] if losses.shape.rank == 2 else 1)
            value = tf.reduce_sum(losses) / count
        variables = model.trainable_variables
        adam.apply(tape.gradient(value, variables), variables)
        accuracy.update_state(y, logits)
        return value

    return step


def batches_of(case: Case, strategy: Any) -> Iterator[Any]:
    """Global batches without end, dealt to the replicas."""
    x, y = case.rows(8 * case.batch)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    dataset = dataset.batch(case.batch, drop_remainder=True)
    return iter(strategy.experimental_distribute_dataset(dataset))


def loop(case: Case, strategy: Any, compiled: bool) -> Train:
    """Train with a custom loop.

    Args:
        case: The model, its data and its batch size.
        strategy: Ours, or a native one.
        compiled: Whether a tf.function is around the step of all replicas.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        step = step_of_replica(case)
    batches = batches_of(case, strategy)

    def step_of_all(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    if compiled:
        step_of_all = tf.function(step_of_all)

    def train(steps: int) -> None:
        total = 0.0
        for _ in range(steps):
            total += step_of_all(*next(batches))
        float(total)

    return train


def steps_of_native_fit(case: Case) -> Train:
    return steps_of_fit(case, native_strategy())


def steps_of_native_fit_on_one_device(case: Case) -> Train:
    return steps_of_fit(case, native_strategy(one_device=True))


def native_loop(case: Case) -> Train:
    return loop(case, native_strategy(), compiled=True)


def native_loop_on_one_device(case: Case) -> Train:
    return loop(case, native_strategy(one_device=True), compiled=True)


def native_loop_of_workers(case: Case) -> Train:
    """One of several processes, as TF_CONFIG says; its `fit` fails in Keras."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return loop(case, strategy, compiled=True)
