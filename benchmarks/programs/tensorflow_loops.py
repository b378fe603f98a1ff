"""Steps of `fit` and custom loops on TensorFlow, on a native strategy or on ours."""

import threading
from typing import Any

import keras
import tensorflow as tf

from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Train


def native_strategy(
    name: str = "MirroredStrategy", one_device_sum: bool = False
) -> Any:
    """Return a native strategy; "" for the one of a single device."""
    if not name:
        return tf.distribute.get_strategy()
    if name != "MirroredStrategy":
        return getattr(tf.distribute, name)()
    operations = tf.distribute.ReductionToOneDevice() if one_device_sum else None
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], operations)


class _Steps(keras.callbacks.Callback):
    """Callback of an endless `fit` in its own thread, which waits between turns."""

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
    """Train by one endless `model.fit`, without its start.

    On a native strategy, where it makes three distributed iterators, that is as long as
    60 steps of the smallest of these models.
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


def loop(case: Case, strategy: Any, compiled: bool = True) -> Train:
    """Train with a custom loop; if `compiled`, in a tf.function of all replicas."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, adam = case.build(), optimizer()
        adam.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of_rows = loss(reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = loss_of_rows(y, logits)
            # Of 64 targets for each row of the transformer, one for the others.
            count = case.batch * (losses.shape[1] if losses.shape.rank == 2 else 1)
            value = tf.reduce_sum(losses) / count
        variables = model.trainable_variables
        adam.apply(tape.gradient(value, variables), variables)
        accuracy.update_state(y, logits)
        return value

    x, y = case.rows(8 * case.batch)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    dataset = dataset.batch(case.batch, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    def step_of_all(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    if compiled:
        # As Keras's own fit on a GPU, which compiles what XLA can.
        by_xla = bool(tf.config.list_physical_devices("GPU"))
        step_of_all = tf.function(step_of_all, jit_compile=by_xla or None)

    def train(steps: int) -> None:
        total = 0.0
        for _ in range(steps):
            total += step_of_all(*next(batches))
        float(total)

    return train


def native_steps_of_fit(case: Case, **options: Any) -> Train:
    return steps_of_fit(case, native_strategy(**options))


def native_loop(case: Case, **options: Any) -> Train:
    """Train on a native strategy; `fit` of several workers fails in Keras."""
    return loop(case, native_strategy(**options))
