"""Counts what JAX does in steps of training, by its own profiler.

The profiler notes every collective that a device runs, with the program that it is of;
how many bytes a replica gives to it stands in the text of the compiled program.
"""

import collections
import contextlib
import gc
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from keras_strategy.rules import spans

# One that is begun and ended by two operations is counted where it begins. One that
# XLA did not join with others has JAX's own name.
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|psum|all_gather|reduce_scatter)(-start)?(\.\d+)?"
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_compilations = 0


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """See `Engine.count`.

    Returns:
        The collectives, the bytes that one replica gives to them, the programs that
        were compiled, and the arrays that were copied between host and devices: one
        for each device that gets a part of it, one for each that the host reads.

    Raises:
        RuntimeError: If it is not known which of the process's programs was run.
    """
    counted = _count(train, steps)
    if counted is None:
        with _compiled_anew():
            train(steps)
            counted = _count(train, steps)
    if counted is None:
        raise RuntimeError(
            "It is not known which of this process's compiled programs the steps ran: "
            "none, or several, have the operations of the profile. Count the steps in "
            "a process of their own."
        )
    return counted


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Surrounds what is compiled as if nothing had been compiled before.

    The programs of other models are gone then. And a program out of JAX's cache on disk
    has lost the names by which the profile calls its operations.
    """
    gc.collect()  # what still holds a program
    jax.clear_caches()
    config: Any = jax.config
    used = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()


def _count(
    train: Callable[[int], None], steps: int
) -> tuple[int, int, int, int] | None:
    before = _compilations
    events = [(name, stats) for name, stats, _ in _profile(train, steps)]
    compilations = _compilations - before
    # What the devices run, by the number that the profiler gives the program.
    programs: dict[Any, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    names: dict[Any, str] = {}
    devices = {stats["device_ordinal"] for _, stats in events if "hlo_op" in stats}
    # Of several workers, this one's.
    first = min(devices, default=0)
    splits = transfers = 0
    for name, stats in events:
        if name == "DevicePutWithSharding":
            splits += 1
        elif name in ("DevicePut", "np.asarray(jax.Array)"):
            transfers += 1
        elif "hlo_op" in stats:
            if stats["device_ordinal"] != first:
                continue
            number = stats["program_id"]
            names[number] = stats["hlo_module"]
            programs[number][stats["hlo_op"]] += 1
    collectives = data = 0
    for number, ran in programs.items():
        some = {op: n for op, n in ran.items() if _COLLECTIVE.fullmatch(op)}
        if some:
            collectives += sum(some.values())
            sizes = _sizes(names[number], set(ran), len(devices))
            if sizes is None:
                return None
            data += sum(n * sizes[op] for op, n in some.items())
    return collectives, data, compilations, transfers + splits * len(devices)


def shares(train: Callable[[int], None], steps: int) -> tuple[float, float] | None:
    """See `Engine.shares`: those of this process's first device."""
    ran = [
        (stats["device_ordinal"], stats["hlo_op"], span)
        for _, stats, span in _profile(train, steps)
        if "hlo_op" in stats
    ]
    first = min((device for device, *_ in ran), default=0)
    return spans.shares(
        (*span, bool(_COLLECTIVE.match(name)))
        for device, name, span in ran
        if device == first
    )


def _profile(
    train: Callable[[int], None], steps: int
) -> Iterator[tuple[str, dict[str, Any], tuple[float, float]]]:
    """The name of each event, what is said of it, and when it began and ended."""
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


def _sizes(module: str, ran: set[str], devices: int) -> dict[str, int] | None:
    """The bytes that each collective of a program gets from one replica.

    The profiler's number of a program is not among what an executable says of itself.
    So it is found by what it ran.

    Args:
        module: The program's name, which others may have too.
        ran: The names of the operations that it ran.
        devices: How many devices ran them.

    Returns:
        None where several programs fit, as those of models of other sizes do.
    """
    found = []
    for executable in jax.devices()[0].client.live_executables():
        text = executable.hlo_modules()[0].to_string()
        lines = dict(re.findall(r"^\s*(?:ROOT )?%(\S+) = (.*)$", text, re.MULTILINE))
        if text.startswith(f"HloModule {module},") and ran <= set(lines):
            some = filter(_COLLECTIVE.fullmatch, ran)
            sizes = {op: _given(lines[op], devices) for op in some}
            found += [sizes] if sizes not in found else []
    return found[0] if len(found) == 1 else None


def _given(operation: str, devices: int) -> int:
    """The bytes of what a replica gives to a collective, by its text."""
    result, name = re.split(r" (?=[a-z-]+\()", operation, maxsplit=1)
    size = sum(
        math.prod(map(int, filter(None, dimensions.split(",")))) * _width(dtype)
        for dtype, dimensions in _SHAPE.findall(result)
    )
    if name.startswith("all-gather"):
        return size // devices
    if name.startswith("reduce-scatter"):
        return size * devices
    return size


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    return int(re.findall(r"\d+", dtype)[0]) // 8


def _listen(event: str, duration_secs: float, **kwargs: Any) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


# Once, for as long as the process lives: JAX has no public way to take one back.
jax.monitoring.register_event_duration_secs_listener(_listen)
