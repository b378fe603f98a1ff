"""Costs of a training step on JAX: reported by its compiler and its profiler."""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.core.protocols import PlannedStep, TimeFractions
from keras_strategy.devices import LogicalDevices
from keras_strategy.keras_patches.internals import byte_count, stored_dtype
from keras_strategy.training.reduction import compute_and_comm_fractions
from keras_strategy.training.sharding import ShardSpec, creating_slots


def without_memory(fn: Callable[[], Any]) -> Any:
    results: list[Any] = []
    jax.eval_shape(lambda: results.append(fn()))
    return results[0]


def local_bytes(step: PlannedStep) -> tuple[int, int]:
    def local(variable: Any, is_sharded: bool) -> int:
        spec = ShardSpec.for_shape(tuple(variable.shape), step.replicas)
        return byte_count(variable) // (spec.num_shards if is_sharded else 1)

    weights = [local(weight, step.shard == "parameters") for weight in step.weights]
    slots = [local(slot, step.shard is not None) for slot in step.optimizer.variables]
    return sum(weights), sum(slots)


def measure_step(step: PlannedStep) -> int | str:
    devices = jax.devices()[: step.replicas]
    if len(devices) < step.replicas:
        return (
            f"JAX compiles the step for {step.replicas} devices, and this process has "
            f"{len(devices)}. `ks.config.set_logical_devices` sets those of CPUs."
        )
    names = tuple([(f"{device.platform}:{device.id}",) for device in devices])
    distribution = ReplicaDistribution(LogicalDevices((names,)), shard=step.shard)

    def abstract(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        sharding = sharding or distribution.get_variable_layout(x)
        return jax.ShapeDtypeStruct(tuple(x.shape), stored_dtype(x), sharding=sharding)

    def train(state: Any, inputs: Any) -> Any:
        values, states, slots = state
        loss_of = jax.value_and_grad(step.loss_of, has_aux=True)
        (_, outputs), gradients = loss_of(values, states, inputs)
        values, slots = step.optimizer.stateless_apply(slots, gradients, values)
        return outputs, (values, states, slots)

    with creating_slots():
        slots = list(map(abstract, step.optimizer.variables))
    state = list(map(abstract, step.weights)), list(map(abstract, step.states)), slots
    inputs = step.inputs(step.replicas * step.rows)
    inputs = jax.tree.map(lambda x: abstract(x, distribution.split), inputs)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    program = jax.jit(train, out_shardings=(None, shardings), donate_argnums=0)
    memory: Any = program.lower(state, inputs).compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = sum([x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs)])
    return memory.temp_size_in_bytes + results + size // step.replicas


# An asynchronous one counts at its start. One that was not combined keeps JAX's name.
COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|psum|all_gather|reduce_scatter)(-start)?(\.\d+)?"
)


def profile(train: Callable[[int], None], steps: int) -> TimeFractions | None:
    events = [
        (stats["device_ordinal"], stats["hlo_op"], span)
        for _, stats, span in profile_events(train, steps)
        if "hlo_op" in stats
    ]
    first = min([device for device, *_ in events], default=0)
    local = [(name, span) for device, name, span in events if device == first]
    spans = [(*span, bool(COLLECTIVE.match(name))) for name, span in local]
    fractions = compute_and_comm_fractions(spans)
    calls = [name for name, _ in local if COLLECTIVE.fullmatch(name)]
    return fractions and TimeFractions(*fractions, len(calls))


def profile_events(
    train: Callable[[int], None], steps: int
) -> Iterator[tuple[str, dict[str, Any], tuple[float, float]]]:
    """Yield the name, statistics and time span of each profiled event."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            train(steps)
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                yield event.name, dict(event.stats), (event.start_ns, event.end_ns)
