"""Costs of a training step on JAX: measured for `plan`, and counted by its profiler.

A plan compiles a step of abstract arrays, and the compiler reports its memory. The
profiler records every collective that a device runs, with its program. The HLO text of
that program contains the number of bytes.
"""

import collections
import gc
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.devices import LogicalDevices
from keras_strategy.keras_patches.variables_optimizers import byte_count, stored_dtype
from keras_strategy.training.reduction import compute_and_comm_fractions
from keras_strategy.training.sharding import ShardSpec, creating_slots


def without_memory(fn: Callable[[], Any]) -> Any:
    results: list[Any] = []
    jax.eval_shape(lambda: results.append(fn()))
    return results[0]


def local_bytes(
    weights: Sequence[Any],
    slots: Sequence[Any],
    _: Any,
    replicas: int,
    shard: str | None,
) -> tuple[int, int]:
    def local(variable: Any, is_sharded: bool) -> int:
        spec = ShardSpec.for_shape(tuple(variable.shape), replicas)
        return byte_count(variable) // (spec.num_shards if is_sharded else 1)

    return (
        sum([local(weight, shard == "parameters") for weight in weights]),
        sum([local(slot, shard is not None) for slot in slots]),
    )


def measure_step(
    loss_of: Callable[..., tuple[Any, Any]],
    optimizer: Any,
    weights: Sequence[Any],
    states: Sequence[Any],
    inputs: Any,
    replicas: int,
    shard: str | None,
) -> int:
    devices = jax.devices()[:replicas]
    if len(devices) < replicas:
        raise NotImplementedError(
            f"JAX compiles the step for {replicas} devices, and this process has "
            f"{len(devices)}. `ks.config.set_logical_devices` sets those of CPUs."
        )
    names = [(f"{device.platform}:{device.id}",) for device in devices]
    distribution = ReplicaDistribution(LogicalDevices((tuple(names),)), shard=shard)

    def abstract(x: Any, sharding: Any, times: int = 1) -> jax.ShapeDtypeStruct:
        shape = (times * x.shape[0], *x.shape[1:]) if times > 1 else tuple(x.shape)
        return jax.ShapeDtypeStruct(shape, stored_dtype(x), sharding=sharding)

    def placed(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [abstract(v, distribution.get_variable_layout(v)) for v in variables]

    def step(state: Any, inputs: Any) -> Any:
        weights, states, slots = state
        (_, outputs), gradients = jax.value_and_grad(
            lambda values: loss_of(values, states, inputs), has_aux=True
        )(weights)
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        return outputs, (weights, states, slots)

    with creating_slots():
        slots = placed(optimizer.variables)
    state = placed(weights), placed(states), slots
    batch = jax.tree.map(lambda x: abstract(x, distribution.split, replicas), inputs)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    program = jax.jit(step, out_shardings=(None, shardings), donate_argnums=0)
    memory: Any = program.lower(state, batch).compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    rows = sum([x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)]) // replicas
    return memory.temp_size_in_bytes + results + rows


# An asynchronous collective is counted at its start. A collective that XLA did not
# combine with others keeps JAX's name.
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|psum|all_gather|reduce_scatter)(-start)?(\.\d+)?"
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_compilations = 0


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    counts = _count(train, steps)
    if counts is None:
        # Again without the programs of other models. A program from the disk cache has
        # lost the operation names that the profile uses.
        gc.collect()  # objects that hold a program
        jax.clear_caches()
        config: Any = jax.config
        enabled = config.jax_enable_compilation_cache
        config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # or it ignores the new setting
        try:
            train(steps)
            counts = _count(train, steps)
        finally:
            config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()
    if counts is None:
        raise RuntimeError(
            "Could not identify the compiled program that the steps ran: none, or "
            "several, of this process's programs have the operations of the profile. "
            "Count the steps in a separate process."
        )
    return counts


def _count(
    train: Callable[[int], None], steps: int
) -> tuple[int, int, int, int] | None:
    before = _compilations
    events = [(name, stats) for name, stats, _ in _profile(train, steps)]
    compilations = _compilations - before
    # The operations of each program, keyed by the profiler's program id.
    programs: dict[Any, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    names: dict[Any, str] = {}
    devices = {stats["device_ordinal"] for _, stats in events if "hlo_op" in stats}
    first = min(devices, default=0)  # of this worker's
    # A copy is counted once for each device that receives a part of an array, and once
    # for each array that the host reads.
    splits = transfers = 0
    for name, stats in events:
        if name == "DevicePutWithSharding":
            splits += 1
        elif name in ("DevicePut", "np.asarray(jax.Array)"):
            transfers += 1
        elif "hlo_op" in stats:
            if stats["device_ordinal"] != first:
                continue
            program = stats["program_id"]
            names[program] = stats["hlo_module"]
            programs[program][stats["hlo_op"]] += 1
    collectives = num_bytes = 0
    for program, ops in programs.items():
        counts = {op: n for op, n in ops.items() if _COLLECTIVE.fullmatch(op)}
        if counts:
            collectives += sum(counts.values())
            sizes = _collective_bytes(names[program], set(ops), len(devices))
            if sizes is None:
                return None
            num_bytes += sum(n * sizes[op] for op, n in counts.items())
    return collectives, num_bytes, compilations, transfers + splits * len(devices)


def shares(train: Callable[[int], None], steps: int) -> tuple[float, float] | None:
    """Implement `Engine.compute_and_comm_fractions` for this process's first device."""
    events = [
        (stats["device_ordinal"], stats["hlo_op"], span)
        for _, stats, span in _profile(train, steps)
        if "hlo_op" in stats
    ]
    first = min((device for device, *_ in events), default=0)
    return compute_and_comm_fractions(
        (*span, bool(_COLLECTIVE.match(name)))
        for device, name, span in events
        if device == first
    )


def _profile(
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


def _collective_bytes(
    module: str, ops: set[str], devices: int
) -> dict[str, int] | None:
    """Return the bytes a replica sends in each collective of a program, or None."""
    # An executable does not report the profiler's program id. Its name, which others
    # may share, and its operations identify the program, if exactly one result fits.
    candidates = []
    for executable in jax.devices()[0].client.live_executables():
        text = executable.hlo_modules()[0].to_string()
        lines = dict(re.findall(r"^\s*(?:ROOT )?%(\S+) = (.*)$", text, re.MULTILINE))
        if text.startswith(f"HloModule {module},") and ops <= set(lines):
            names = filter(_COLLECTIVE.fullmatch, ops)
            sizes = {op: _input_bytes(lines[op], devices) for op in names}
            candidates += [sizes] if sizes not in candidates else []
    return candidates[0] if len(candidates) == 1 else None


def _input_bytes(operation: str, devices: int) -> int:
    """Return the bytes of one replica's input of a collective, given its HLO text."""
    result, name = re.split(r" (?=[a-z-]+\()", operation, maxsplit=1)
    size = sum(
        math.prod(map(int, filter(None, dimensions.split(","))))
        * (1 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0]) // 8)
        for dtype, dimensions in _SHAPE.findall(result)
    )
    if name.startswith("all-gather"):
        return size // devices
    if name.startswith("reduce-scatter"):
        return size * devices
    return size


def _listen(event: str, duration_secs: float, **kwargs: Any) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


# Registered once per process: JAX has no public way to unregister a listener.
jax.monitoring.register_event_duration_secs_listener(_listen)
