"""Our loops on the jax backend."""

import jax
import keras

import keras_strategy as ks
from benchmarks.cases import Case, optimizer
from benchmarks.jax_peers import batches
from benchmarks.programs import Train


def run_loop(
    case: Case, reduces: bool = False, batch_statistics: str | None = None
) -> Train:
    """Train with the same loop and `strategy.run`.

    Args:
        case: What is trained.
        reduces: Whether the loss is reduced in every step.
        batch_statistics: The argument of the strategy.
    """
    strategy = ks.MirroredStrategy(batch_statistics=batch_statistics)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, adam = case.build(), optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_row = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        def loss_of_batch():
            logits = model(x, training=True)
            # The mean over all entries of the global batch.
            losses = keras.ops.mean(
                keras.ops.reshape(per_row(y, logits), (len(x), -1)), axis=-1
            )
            mean = ks.compute_average_loss(losses, global_batch_size=case.batch)
            return mean, logits

        variables = model.trainable_variables
        (value, logits), gradients = ks.value_and_grad(
            loss_of_batch, variables, has_aux=True
        )()
        adam.apply(gradients, variables)
        accuracy.update_state(y, logits)
        return value

    dataset = strategy.experimental_distribute_dataset(batches(case))
    elements = iter(())

    def train(steps: int) -> None:
        nonlocal elements
        value = None
        for _ in range(steps):
            element = next(elements, None)
            if element is None:
                elements = iter(dataset)
                element = next(elements)
            value = strategy.run(step, args=element)
            if reduces:
                value = strategy.reduce("SUM", value)
        states = (*model.variables, *adam.variables, *accuracy.variables)
        jax.block_until_ready([v.value for v in states])
        jax.block_until_ready(strategy.experimental_local_results(value))

    return train


def run_loop_of_global_statistics(case: Case) -> Train:
    return run_loop(case, batch_statistics="global")


def run_and_reduce_loop(case: Case) -> Train:
    return run_loop(case, reduces=True)
