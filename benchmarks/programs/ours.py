"""Our programs: `fit` and loops on a strategy."""

import os
from typing import Any

import keras

import keras_strategy as ks
from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Fit, Train


def create_strategy(
    name: str, communication: Any = None, **options: Any
) -> ks.Strategy:
    """Return a strategy of all devices; `communication` is for its options."""
    if communication is not None:
        communication = ks.experimental.CommunicationOptions(**communication)
        options["communication_options"] = communication
    if name == "OneDeviceStrategy":
        options["device"] = ks.MirroredStrategy().extended.worker_devices[0]
    return getattr(ks, name)(**options)


def fit_under(
    strategy: ks.Strategy,
    case: Case,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
    **arguments: Any,
) -> Fit:
    """Train with arguments of `fit`."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.compiled(steps_per_execution, jit_compile)
    return Fit(model, case, **arguments)


def fit(
    case: Case,
    strategy: str = "MirroredStrategy",
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
    compile_backend: str | None = None,
    exact_random: bool = True,
    exact: bool = False,
    **options: Any,
) -> Fit:
    """Train by `fit`.

    If `exact`, the weights can be compared with one device's. `options` are those of
    the strategy, and `compile_backend` is torch.compile's.
    """
    if exact:
        from benchmarks.gpu import engine

        engine.set_exact()
    if compile_backend is not None:
        os.environ["KERAS_STRATEGY_TORCH_COMPILE_BACKEND"] = compile_backend
    ks.config.exact_random(exact_random)
    made = create_strategy(strategy, **options)
    return fit_under(made, case, steps_per_execution, jit_compile, shuffle=not exact)


def loop(
    case: Case,
    strategy: str = "MirroredStrategy",
    reduces: bool = False,
    **options: Any,
) -> Train:
    """Train by `strategy.run` on JAX and torch; if `reduces`, reduce each loss."""
    return loop_under(create_strategy(strategy, **options), case, reduces)[0]


def loop_under(
    strategy: ks.Strategy, case: Case, reduces: bool = False
) -> tuple[Train, keras.Model]:
    """Return a custom loop and the model that it trains."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, adam = case.build(), optimizer()
        adam.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        # The peer on torch keeps the mean loss as a metric, the one on JAX returns it.
        is_torch = keras.backend.backend() == "torch"
        mean_loss = keras.metrics.Mean() if is_torch else None
    loss_of_rows = loss(reduction="none")

    def loss_fn(x, y):
        logits = model(x, training=True)
        losses = loss_of_rows(y, logits)
        # The mean over all entries of the global batch.
        losses = losses.reshape(len(losses), -1).mean(-1)
        return ks.compute_average_loss(losses, global_batch_size=case.batch), logits

    value_and_grad = ks.value_and_grad(loss_fn, model.trainable_variables, has_aux=True)

    def step(x, y):
        (value, logits), gradients = value_and_grad(x, y)
        adam.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, logits)
        if mean_loss is not None:
            mean_loss.update_state(value * strategy.num_replicas_in_sync)
            return None
        return value

    def train(steps: int) -> None:
        value = None
        for batch in strategy.experimental_distribute_dataset(case.batches(steps)):
            value = strategy.run(step, args=batch)
            if reduces:
                value = strategy.reduce("SUM", value)
        for metric in filter(None, (accuracy, mean_loss)):
            float(metric.result())
            metric.reset_state()
        if value is not None:
            for local in strategy.experimental_local_results(value):
                float(local)

    return train, model


def tensorflow_steps(case: Case, steps_per_execution: int = 1, **options: Any) -> Train:
    """Train as the peer `tensorflow_loops.steps_of_fit` does."""
    from benchmarks.programs import tensorflow_loops

    strategy = create_strategy("MirroredStrategy", **options)
    return tensorflow_loops.steps_of_fit(case, strategy, steps_per_execution)


def tensorflow_loop(
    case: Case, strategy: str = "MirroredStrategy", compiled: bool = False
) -> Train:
    """Train as the peer `tensorflow_loops.loop` does."""
    from benchmarks.programs import tensorflow_loops

    return tensorflow_loops.loop(case, create_strategy(strategy), compiled)
