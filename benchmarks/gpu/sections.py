"""Sections of a run on GPUs; each runs in its own process."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.comparisons import (
    BACKENDS,
    DDP_LOOP,
    EXACT_CNN,
    EXACT_TRANSFORMER,
    JAX_LOOP,
    ON_GPUS,
    PLAIN_FIT,
    REHEARSAL,
    Program,
    fit,
    fit_of_workers,
    native_loop,
)
from benchmarks.gpu import engine
from benchmarks.paired_processes import ProgramProcesses
from benchmarks.paired_timing import compare, warm

Row = dict[str, Any]
SECONDS, ROUNDS = (0.02, 2) if REHEARSAL else (0.3, 7)


@dataclasses.dataclass(frozen=True)
class Section:
    """Part of a run."""

    title: str
    rows: Callable[[float], Iterator[Row]]  # given its time limit
    seconds: int  # its time limit
    backends: tuple[str, ...] = BACKENDS
    gpus: int = 1  # that it needs
    timed: bool = True  # nothing else may run meanwhile
    divided: bool = False  # two CPU devices in a rehearsal


def about(_: float) -> Iterator[Row]:
    yield engine.about()


def equality(seconds: float) -> Iterator[Row]:
    """Yield the equality table on the backend's devices, while time is left."""
    import keras_strategy as ks

    engine.set_exact()
    devices = list(ks.MirroredStrategy().extended.worker_devices)
    yield from _equal_rows(devices, seconds)


def logical(seconds: float) -> Iterator[Row]:
    """Yield the equality table on two logical GPUs of one GPU."""
    engine.set_exact()
    devices = engine.divide()
    if engine.BACKEND == "torch":
        seconds /= 2
        yield from _equal_rows(devices, seconds, "parameters")
    yield from _equal_rows(devices, seconds)


def _equal_rows(
    devices: list[str], seconds: float, shard: str | None = None
) -> Iterator[Row]:
    import keras_strategy as ks
    from conformance.compare import differences
    from conformance.equality.__main__ import ROWS, run, tolerances
    from conformance.equality.cases import all_cases

    until = time.monotonic() + 0.6 * seconds  # some rows take long
    strategy = ks.MirroredStrategy(devices, shard=shard)
    suffix = f" (shard={shard!r})" if shard else ""
    # The optimizers last: they are many, and alike to a backend.
    cases = sorted(all_cases(), key=lambda case: case.name.split()[0] == "optimizer")
    for case in cases[: 2 if REHEARSAL else None]:
        if time.monotonic() > until:
            return
        if engine.BACKEND in case.not_on:
            continue
        row = {"what": case.name + suffix, "tolerance": tolerances(case)}
        try:
            found = differences(run(case, ROWS[0]), run(case, ROWS[0], strategy))
        except Exception as error:  # the others are still compared
            yield row | {"error": f"{type(error).__name__}: {error}"}
            continue
        worst = max(found["weights"], found["optimizer"])
        numbers = worst, found["logs"], found["predictions"]
        equal = all(a <= b for a, b in zip(numbers, tolerances(case), strict=True))
        yield row | {"difference": numbers, "equal": equal}


def workers_on_one_gpu(_: float) -> Iterator[Row]:
    """Two processes that share a GPU; NCCL refuses that, so the values go by the host.

    JAX has no other way on GPUs, and is expected to fail.
    """
    yield _workers([engine.visible(0)] * 2, "RING")


def workers_on_two_gpus(_: float) -> Iterator[Row]:
    implementation = "RING" if REHEARSAL else "NCCL"
    yield _workers([engine.visible(0), engine.visible(1)], implementation)


def sharding(_: float) -> Iterator[Row]:
    """Yield memory and weights of two processes that share a GPU, by `shard=`."""
    places = [engine.visible(0)] * 2
    for shard in "parameters", "optimizer", None:
        yield _workers(places, "RING", EXACT_TRANSFORMER, shard, timed=False)


def _workers(
    places: Sequence[Mapping[str, str]],
    implementation: str,
    case: str = EXACT_CNN,
    shard: str | None = None,
    timed: bool = True,
) -> Row:
    """Train on two workers and on one device, and compare the weights."""
    from conformance.compare import WEIGHTS, largest

    communication = {"implementation": implementation}
    ours = fit_of_workers(communication=communication, shard=shard, exact=True)
    what = f"{case}: fit, 2 processes, {implementation}"
    if shard:
        what += f", shard={shard!r}"
    plain = Program(PLAIN_FIT.function, {"exact": True})
    with _ready(case, (ours, places), (plain, places[:1])) as (many, one):
        for side in many, one:
            side.train(5)
        (expected,) = one.ask("call", "gpu.engine:weights")
        found = many.ask("call", "gpu.engine:weights")
        worst = max(largest(expected, weights) for weights in found)
        row = _paired(many, one, what, "one device") if timed else {"what": what}
        row["device_megabytes"] = _megabytes("peak", many, one)
        if not timed:
            row["resting_megabytes"] = _megabytes("resting", many, one)
    equal = worst <= WEIGHTS
    return row | {"difference": [worst], "tolerance": [WEIGHTS], "equal": equal}


def ratios(_: float) -> Iterator[Row]:
    """One device: our fit, Keras's, and a loop by hand, in turn."""
    by_hand = {
        "jax": JAX_LOOP,
        "torch": Program(DDP_LOOP.function, {"distributed": False}),
        "tensorflow": native_loop(name=""),
    }[engine.BACKEND]
    one_device = fit(strategy="OneDeviceStrategy")
    place = [engine.visible(0)]
    programs = [(program, place) for program in (one_device, PLAIN_FIT, by_hand)]
    for case in ON_GPUS:
        with _ready(case, *programs) as (ours, *peers):
            for peer, name in zip(peers, ("plain Keras", "by hand"), strict=True):
                row = _paired(ours, peer, f"{case}: fit, OneDeviceStrategy", name)
                yield row | {"device_megabytes": _megabytes("peak", ours, peer)}


@contextlib.contextmanager
def _ready(case: str, *programs: Any) -> Iterator[list[ProgramProcesses]]:
    """Context manager of processes that have trained for one step.

    They are not forked, as a process that has imported a backend may have touched the
    GPU. The backends start at the same time.
    """
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(
                ProgramProcesses(program, case, len(places), environments=places)
            )
            for program, places in programs
        ]
        for side in sides:
            side.ready()
        yield sides


def _paired(
    ours: ProgramProcesses, peer: ProgramProcesses, what: str, name: str
) -> Row:
    steps = warm(ours.train, peer.train, SECONDS)
    pairing = compare(ours.train, peer.train, steps, ROUNDS)
    return {
        "what": what,
        "peer": name,
        "speeds": {u: dataclasses.asdict(s) for u, s in pairing.speeds.items()},
        "once_seconds": pairing.fixed_seconds,
        "first_step_seconds": [ours.first_step, peer.first_step],
        "peak_mb": [ours.peak_mb, peer.peak_mb],
    }


def _megabytes(kind: str, *sides: ProgramProcesses) -> list[float | None]:
    return [side.ask("call", f"gpu.engine:{kind}_megabytes")[0] for side in sides]


ABOUT = Section("about", about, 90)
SECTIONS = (
    Section("equality", equality, 120, timed=False, divided=True),
    Section(
        *("two logical GPUs", logical, 120, ("torch", "tensorflow")),
        timed=False,
        divided=True,
    ),
    Section("two processes, one GPU", workers_on_one_gpu, 60, timed=False),
    Section("sharding, two processes, one GPU", sharding, 110, ("torch",)),
    Section("two processes, two GPUs", workers_on_two_gpus, 80, gpus=2),
    Section("one GPU: ratios", ratios, 110),
)


def run_section(title: str, seconds: float, path: str) -> None:
    """Write each row as a line of a file, where it stays if the section fails."""
    (section,) = (s for s in (ABOUT, *SECTIONS) if s.title == title)
    with open(path, "a") as file:
        for row in section.rows(seconds):
            print(json.dumps(row), file=file, flush=True)
