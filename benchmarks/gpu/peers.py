"""Programs on GPUs that are not ours: loops by hand, and native strategies."""

import itertools
from typing import Any

import keras
import numpy as np

from benchmarks.cases import Case, loss, optimizer
from benchmarks.gpu import engine
from benchmarks.programs import Train, fit


class Fit:
    """`fit` in the order of the rows, so that models can be compared.

    Args:
        case: What is trained.
        scope: Where the model is made.
    """

    def __init__(self, case: Case, scope: Any = None) -> None:
        self._case = case
        keras.utils.set_random_seed(0)
        if scope is None:
            self.model = case.compiled()
        else:
            with scope:
                self.model = case.compiled()

    def __call__(self, steps: int) -> None:
        x, y = self._case.rows(steps * self._case.batch)
        self.model.fit(x, y, batch_size=self._case.batch, shuffle=False, verbose=0)


def exact_fit(case: Case) -> Train:
    engine.exact()
    return Fit(case)


def weights(program: Fit) -> list[np.ndarray]:
    return [np.asarray(value) for value in program.model.get_weights()]


def device_megabytes(_: Train) -> float | None:
    return engine.peak_megabytes()


def resting_megabytes(_: Train) -> float | None:
    return engine.resting_megabytes()


def native_logical_fit(case: Case) -> Train:
    """On TensorFlow, `fit` on tf.distribute over two logical GPUs of one."""
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(engine.divide()).scope():
        return fit(case.compiled(), case)


def by_hand(case: Case) -> Train:
    """Train a Keras model on one device with a loop by hand."""
    if engine.BACKEND == "jax":
        from benchmarks import jax_peers

        return jax_peers.by_hand(case)
    return {"torch": _torch, "tensorflow": _tensorflow}[engine.BACKEND](case)


def _torch(case: Case, distributed: bool = False) -> Train:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    keras.utils.set_random_seed(0)
    model, adam, loss_of = case.build(), optimizer(), loss()
    adam.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    variables = model.trainable_variables
    device = variables[0].value.device
    share = slice(None)
    call: Any = model
    if distributed:
        nccl = device.type == "cuda"
        torch.distributed.init_process_group("nccl" if nccl else "gloo")
        call = DistributedDataParallel(model, gradient_as_bucket_view=True)
        share = slice(torch.distributed.get_rank(), None, 2)

    def train(steps: int) -> None:
        arrays = case.rows(steps * case.batch)
        x, y = (torch.from_numpy(array).split(case.batch) for array in arrays)
        value = None
        for rows, targets in zip(x, y, strict=True):
            rows, targets = rows[share].to(device), targets[share].to(device)
            logits = call(rows, training=True)
            value = loss_of(targets, logits)
            call.zero_grad()
            value.backward()
            with torch.no_grad():
                adam.apply([v.value.grad for v in variables], variables)
                accuracy.update_state(targets, logits)
        float(accuracy.result()), float(value.detach())

    return train


def _tensorflow(case: Case) -> Train:
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model, adam, loss_of = case.build(), optimizer(), loss()
    adam.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    # As Keras's own fit on a GPU, which compiles what XLA can.
    @tf.function(jit_compile=bool(tf.config.list_physical_devices("GPU")))
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            value = loss_of(y, logits)
        variables = model.trainable_variables
        adam.apply(tape.gradient(value, variables), variables)
        accuracy.update_state(y, logits)
        return value

    data = tf.data.Dataset.from_tensor_slices(case.rows(8 * case.batch))
    data = data.batch(case.batch, drop_remainder=True).repeat().prefetch(2)
    batches = iter(data)

    def train(steps: int) -> None:
        value = 0.0
        for x, y in itertools.islice(batches, steps):
            value = step(x, y)
        float(value), float(accuracy.result())

    return train


def under_ddp(case: Case) -> Train:
    """On torch, the same by two processes."""
    return _torch(case, distributed=True)


def all_reduce(case: Case) -> Train:
    """On torch, the sum of gradients alone, by two processes."""
    import torch

    model = case.build()
    size = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    device = model.trainable_variables[0].value.device
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    gradients = torch.ones(size, device=device)

    def train(steps: int) -> None:
        for _ in range(steps):
            torch.distributed.all_reduce(gradients)
            gradients.mul_(0.5)
        float(gradients[0])

    return train
