"""Sections of the measurement: each yields rows, in its own process."""

import contextlib
import dataclasses
import statistics
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.gpu import engine
from benchmarks.gpu.cases import EXACT, HALF, REHEARSAL, TIMED, TRANSFORMER
from benchmarks.measure import fixed_seconds
from benchmarks.paired_timing import WALL, compare, warm
from benchmarks.sides import Sided
from keras_strategy.testing.worker_runner import start_cold
from tests.equality.compare import WEIGHTS, largest

Row = dict[str, Any]
# A process that has imported an engine may have touched the GPU: it is not forked.
COLD = types.SimpleNamespace(start=start_cold)
SECONDS, ROUNDS = (0.02, 2) if REHEARSAL else (0.3, 7)


# --- exactness


def equality(seconds: float) -> Iterator[Row]:
    """Yield the equality table on the backend's devices, while time is left."""
    import keras_strategy as ks

    engine.exact()
    devices = list(ks.MirroredStrategy().extended.worker_devices)
    yield from _equal_rows(devices, seconds)


def logical(seconds: float) -> Iterator[Row]:
    """Yield the equality table on two logical GPUs of one GPU."""
    engine.exact()
    devices = engine.divide()
    if engine.BACKEND == "torch":
        seconds /= 2
        yield from _equal_rows(devices, seconds, "parameters")
    yield from _equal_rows(devices, seconds)


def logical_speed(_: float) -> Iterator[Row]:
    """`fit` on them, beside a native strategy."""
    pair = _comparison(("gpu.ours:logical_fit", "gpu.peers:native_logical_fit"))
    place = [engine.visible(0)]
    each = [(pair, ours, TIMED[-1], place) for ours in (True, False)]
    with _ready(*each) as (ours, peer):
        name = "tf.distribute.MirroredStrategy"
        yield _paired(ours, peer, f"{TIMED[-1]}: fit, 2 logical GPUs", name)


def _equal_rows(
    devices: list[str], seconds: float, shard: str | None = None
) -> Iterator[Row]:
    import keras_strategy as ks
    from tests.equality.__main__ import ROWS, run, tolerances
    from tests.equality.cases import all_cases
    from tests.equality.compare import differences

    until = time.monotonic() + 0.6 * seconds  # some rows take long
    strategy = ks.MirroredStrategy(devices, shard=shard)
    split = f" (shard={shard!r})" if shard else ""
    # The optimizers last: they are many, and alike to an engine.
    cases = sorted(all_cases(), key=lambda case: case.name.split()[0] == "optimizer")
    for case in cases[: 2 if REHEARSAL else None]:
        if time.monotonic() > until:
            return
        what = case.name + split
        row = {"what": what, "devices": devices, "tolerance": tolerances(case)}
        if engine.BACKEND in case.not_on:
            continue
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


def sharding(_: float) -> Iterator[Row]:
    """Yield memory and weights of two processes that share a GPU, by `shard=`."""
    places = [engine.visible(0)] * 2
    for shard in "parameters", "optimizer", None:
        yield _workers(places, "RING", TRANSFORMER, shard, timed=False)


def workers_by_nccl(_: float) -> Iterator[Row]:
    implementation = "RING" if REHEARSAL else "NCCL"
    yield _workers([engine.visible(0), engine.visible(1)], implementation)


def _workers(
    places: Sequence[Mapping[str, str]],
    implementation: str,
    case: str = EXACT,
    shard: str | None = None,
    timed: bool = True,
) -> Row:
    """Trains on two workers and on one device, and compares the weights."""
    programs = "gpu.ours:workers_fit", "gpu.peers:exact_fit"
    how = {"BENCHMARKS_IMPLEMENTATION": implementation}
    what = f"{case}: fit, 2 processes, {implementation}"
    if shard:
        how["BENCHMARKS_SHARD"] = shard
        what += f", shard={shard!r}"
    ours = _comparison(programs, workers=2)
    with _ready(
        (ours, True, case, [{**place, **how} for place in places]),
        (_comparison(programs), False, case, [places[0]]),
    ) as (many, one):
        for side in many, one:
            side.train(5)
        (expected,) = one.ask("call", "gpu.peers:weights")
        found = many.ask("call", "gpu.peers:weights")
        worst = max(largest(expected, weights) for weights in found)
        row: Row = {"what": what}
        if timed:
            row = _paired(many, one, what, "one device")
        else:
            for name in "device_megabytes", "resting_megabytes":
                call = f"gpu.peers:{name}"
                row[name] = [side.ask("call", call)[0] for side in (many, one)]
    return row | {
        "difference": [worst],
        "tolerance": [WEIGHTS],
        "equal": worst <= WEIGHTS,
    }


# --- speed


def ratios(_: float) -> Iterator[Row]:
    """One device: our fit, Keras's, and a loop by hand, in turn."""
    of_plain = _comparison(("ours:one_device_fit", "programs:plain_fit"))
    by_hand = dataclasses.replace(of_plain, programs=("", "gpu.peers:by_hand"))
    for case in TIMED:
        place = [engine.visible(0)]
        with _ready(
            (of_plain, True, case, place),
            (of_plain, False, case, place),
            (by_hand, False, case, place),
        ) as (ours, plain, hand):
            yield _paired(ours, plain, f"{case}: fit, OneDeviceStrategy", "plain Keras")
            yield _paired(ours, hand, f"{case}: fit, OneDeviceStrategy", "by hand")


def overlap(_: float) -> Iterator[Row]:
    """Yield the share of the all-reduce that overlaps with compute.

    A step of two processes takes as long as one of half the batch on one device, and
    what is not hidden of the sum. For our fit, and for DistributedDataParallel.
    """
    places = [engine.visible(0), engine.visible(1)]
    implementation = "RING" if REHEARSAL else "NCCL"
    how = {"BENCHMARKS_IMPLEMENTATION": implementation}
    two = _comparison(("gpu.ours:workers_fit", "gpu.peers:under_ddp"), workers=2)
    sums = dataclasses.replace(two, programs=("", "gpu.peers:all_reduce"))
    alone = _comparison(("ours:one_device_fit", "gpu.peers:by_hand"))
    seconds = {}
    for name, arguments in {
        "ours": (two, True, TIMED[0], [{**place, **how} for place in places]),
        "DDP": (two, False, TIMED[0], places),
        "ours, half a batch": (alone, False, HALF, places),
        "by hand, half a batch": (alone, False, HALF, places),
        "sum": (sums, False, TIMED[0], places),
    }.items():
        with _ready(arguments) as (side,):
            seconds[name] = _step_seconds(side)
    row: Row = {"what": f"{TIMED[0]}: overlap", "step_seconds": seconds}
    for name, half in ("ours", "ours, half a batch"), ("DDP", "by hand, half a batch"):
        waited = seconds[name] - seconds[half]
        row[f"hidden share of the sum, {name}"] = 1 - waited / seconds["sum"]
    yield row


# --- the processes of a section


def _comparison(programs: tuple[str, str], workers: int = 1) -> Comparison:
    return Comparison(
        engine.BACKEND,
        "",
        "",
        programs,
        None,
        replicas=workers,
        workers=workers,
        catalog="gpu.cases",
    )


@contextlib.contextmanager
def _ready(*arguments: Any) -> Iterator[list[Sided]]:
    """Sides that have trained for one step; their engines start at the same time."""
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(Sided(COLD, *each)) for each in arguments]
        for side in sides:
            side.ready()
        yield sides


def _paired(ours: Sided, peer: Sided, what: str, name: str) -> Row:
    steps = warm(ours.train, peer.train, SECONDS)
    pairing = compare(ours.train, peer.train, steps, ROUNDS)
    return {
        "what": what,
        "peer": name,
        "speeds": {u: dataclasses.asdict(s) for u, s in pairing.speeds.items()},
        "once_seconds": fixed_seconds(pairing),
        "first_step_seconds": [ours.first_step, peer.first_step],
        "device_megabytes": [
            side.ask("call", "gpu.peers:device_megabytes")[0] for side in (ours, peer)
        ],
        "peak_mb": [ours.peak_mb, peer.peak_mb],
    }


def _step_seconds(side: Sided) -> float:
    """Return the median time of a step over all processes, from two lengths."""
    few, many = (1, 4) if REHEARSAL else (4, 32)
    for steps in few, many:
        side.train(steps)
    taken = [side.train(many)[WALL] - side.train(few)[WALL] for _ in range(ROUNDS)]
    return statistics.median(taken) / (many - few)
