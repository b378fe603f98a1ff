"""Our loops on the torch backend."""

import os

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.cases import Case, optimizer
from benchmarks.ours import fit_in_scope
from benchmarks.programs import Train


def workers_fit_during_backward(case: Case) -> Train:
    """`fit` whose gradients leave while others are computed, as DDP's do."""
    options = ks.experimental.CommunicationOptions(bytes_per_pack=1 << 20)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    return fit_in_scope(strategy, case)


def workers_compiled_fit(case: Case) -> Train:
    """`fit` with a graph of torch.compile."""
    return fit_in_scope(ks.MultiWorkerMirroredStrategy(), case, jit_compile=True)


def workers_fit_by_inductor(case: Case) -> Train:
    """`fit` whose graph has kernels of torch.compile's own."""
    os.environ["KERAS_STRATEGY_TORCH_COMPILE_BACKEND"] = "inductor"
    return workers_compiled_fit(case)


def one_replica_compiled_fit(case: Case) -> Train:
    return fit_in_scope(ks.MirroredStrategy(["cpu:0"]), case, jit_compile=True)


def mirrored_compiled_fit(case: Case) -> Train:
    return fit_in_scope(ks.MirroredStrategy(), case, jit_compile=True)


def workers_run_loop(case: Case) -> Train:
    """Train with a custom loop."""
    return run_loop_of(ks.MultiWorkerMirroredStrategy(), case)[0]


def run_loop_of(strategy: ks.Strategy, case: Case) -> tuple[Train, keras.Model]:
    """Return a custom loop and the model that it trains."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, adam = case.build(), optimizer()
        adam.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    of_each_row = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def loss_fn(x, y):
        logits = model(x, training=True)
        losses = of_each_row(y, logits)
        losses = losses.reshape(losses.shape[0], -1).mean(dim=1)
        return ks.compute_average_loss(losses, global_batch_size=case.batch), logits

    value_and_grad = ks.value_and_grad(loss_fn, model.trainable_variables, has_aux=True)

    def step(x, y):
        (value, logits), gradients = value_and_grad(x, y)
        adam.apply(gradients, model.trainable_variables)
        mean_loss.update_state(value * strategy.num_replicas_in_sync)
        accuracy.update_state(y, logits)

    def train(steps: int) -> None:
        x, y = case.rows(steps * case.batch)
        order = np.random.default_rng(0).permutation(len(x)).reshape(steps, -1)
        batches = ((x[rows], y[rows]) for rows in order)
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=batch)
        for metric in (mean_loss, accuracy):
            float(metric.result())
            metric.reset_state()

    return train, model
