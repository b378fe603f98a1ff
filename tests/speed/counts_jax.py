"""Counts of collectives, bytes, programs and copies on JAX, by its profiler.

The profiler records every collective that a device runs, with its program. The HLO text
of that program contains the number of bytes.
"""

import collections
import gc
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from keras_strategy.backends.jax.costs import COLLECTIVE, profile_events

_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_compilations = 0


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count as `tests.speed.counts.count_operations`."""
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
    events = [(name, stats) for name, stats, _ in profile_events(train, steps)]
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
        counts = {op: n for op, n in ops.items() if COLLECTIVE.fullmatch(op)}
        if counts:
            collectives += sum(counts.values())
            sizes = _collective_bytes(names[program], set(ops), len(devices))
            if sizes is None:
                return None
            num_bytes += sum(n * sizes[op] for op, n in counts.items())
    return collectives, num_bytes, compilations, transfers + splits * len(devices)


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
            names = filter(COLLECTIVE.fullmatch, ops)
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
