"""Planning on JAX: abstract evaluation, and the shards of one program."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from keras_strategy.core.protocols import PlannedChoice, StepTrace
from keras_strategy.keras_patches.variables_optimizers import byte_count
from keras_strategy.training.sharding import ShardSpec


def without_memory(fn: Callable[[], Any]) -> Any:
    results: list[Any] = []
    jax.eval_shape(lambda: results.append(fn()))
    return results[0]


def trace_step(
    forward: Callable[[Any], Iterator[Any]], weights: list[Any], _: Any
) -> StepTrace:
    _, backward = jax.vjp(lambda values: list(forward(values))[-1], weights)
    residuals = {id(x): x.nbytes for x in jax.tree.leaves(backward)}
    for weight in weights:
        residuals.pop(id(weight), None)
    return StepTrace(sum(residuals.values()))


def predict(
    weights: Sequence[Any],
    slots: Sequence[Any],
    optimizer: Any,
    replicas: int,
    shard: str | None,
    trace: StepTrace | None,
) -> PlannedChoice:
    def shards_of(variable: Any) -> int:
        return ShardSpec.for_shape(tuple(variable.shape), replicas).num_shards

    def local(variables: Sequence[Any], is_sharded: bool) -> int:
        pairs = [(byte_count(v), shards_of(v) if is_sharded else 1) for v in variables]
        return sum([size // shards for size, shards in pairs])

    has_shards, share = shard == "parameters", (replicas - 1) / replicas
    sizes = list(map(byte_count, weights))
    sharded = [size for w, size in zip(weights, sizes, strict=True) if shards_of(w) > 1]
    # A step of `fit` all-reduces whole gradients, and reduce-scatters those of shards.
    sent = 2 * sum(sizes) + (sum(sharded) if shard == "optimizer" else 0)
    collectives = 1 + len(sharded) * {None: 0, "optimizer": 1, "parameters": 2}[shard]
    parameters = local(weights, has_shards)
    peak = None
    if trace is not None:
        # Beside the gradients, a gathered weight with its gradient; or what an
        # all-reduce returns.
        buffer = parameters if replicas > 1 else 0
        buffer = 2 * max(sizes, default=0) if has_shards else buffer
        peak = parameters + buffer + trace.activations
    return PlannedChoice(
        shard,
        parameters,
        parameters,
        local(slots, shard is not None),
        peak=peak,
        collectives=collectives * (replicas > 1),
        sent=round(share * sent),
    )
