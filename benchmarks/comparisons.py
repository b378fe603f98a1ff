"""Table of comparisons, which imports no backend.

The two programs of a comparison run in processes of their own, and those of peers never
import `keras_strategy`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# Names of `benchmarks.cases`.
MLP = "MLP, batch 128"
LARGE_MLP = "MLP, batch 1024"
WIDE_MLP = "wide MLP"
CNN = "CNN"
NORMALIZED = "CNN with BatchNormalization"
LARGE_NORMALIZED = "CNN of 32 x 32 images with BatchNormalization"
RESNET50 = "ResNet50"
TRANSFORMER = "transformer"
EMBEDDING = "embedding"
ALL = (MLP, LARGE_MLP, CNN, TRANSFORMER, EMBEDDING)
DROPOUT = ("MLP with Dropout", "transformer with Dropout")
# Those of `benchmarks.gpu`: to be compared with one device, and to be timed.
EXACT_CNN, EXACT_TRANSFORMER = "CNN, float32", "transformer, float32"
ON_GPUS = ("transformer, bfloat16", "ResNet, bfloat16", "CNN, bfloat16")
# Everything small, where CPU devices stand for GPUs.
REHEARSAL = bool(os.environ.get("BENCHMARKS_GPU_REHEARSAL"))


@dataclass(frozen=True)
class Program:
    """A function of `benchmarks.programs`, as "module:function", with its options."""

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.function.startswith("ours:")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Our program and a peer's.

    Attributes:
        backend: The Keras backend of both.
        name: What ours does, such as "fit".
        peer: The peer's name.
        ours: Our program.
        theirs: The peer's, which may be another of ours.
        aim: The ratio shall be at least this; None if the peer is only shown.
        cases: The names of its cases. To compile takes longer than to measure, so not
            every comparison has all.
        replicas: The replicas of ours.
        workers: The processes of each side.
        min_steps: The steps of a long turn at least. The difference of two short turns
            is noise if a call varies by more than a step takes.
        needs: A file of the Keras versions that can run both programs.
    """

    backend: str
    name: str
    peer: str
    ours: Program
    theirs: Program
    aim: float | None = None
    cases: tuple[str, ...] = ALL
    replicas: int = 2
    workers: int = 1
    min_steps: int = 8
    needs: str = ""

    @property
    def devices(self) -> int:
        """The devices of each process."""
        return self.replicas // self.workers


BACKENDS = ("jax", "torch", "tensorflow")
KERAS = "plain Keras"
DATA_PARALLEL = "keras.distribution.DataParallel"
BY_HAND = "jax.jit over a mesh, by hand"
DDP = "Keras under DDP"
NATIVE = "tf.distribute.MirroredStrategy"
ONE_DEVICE_SUM = f"{NATIVE}, ReductionToOneDevice"
WORKERS = "MultiWorkerMirroredStrategy"
# With `DataParallel` and `steps_per_execution` on torch.
KERAS_3_16 = "src/backend/torch/distribution_lib.py"

PLAIN_FIT = Program("keras_alone:fit")
DATA_PARALLEL_FIT = Program("keras_alone:data_parallel_fit")
DATA_PARALLEL_OF_WORKERS = Program("keras_alone:data_parallel_fit_of_workers")
JAX_LOOP = Program("jax_loop:by_hand")
DDP_LOOP = Program("torch_loops:keras_loop")
SUM_ON_ONE = {"one_device_sum": True}


def _program(function: str, **options: Any) -> Program:
    return Program(function, options)


fit = partial(_program, "ours:fit")
fit_of_workers = partial(fit, strategy=WORKERS)
loop = partial(_program, "ours:loop")
steps_of_fit = partial(_program, "ours:tensorflow_steps")
tensorflow_loop = partial(_program, "ours:tensorflow_loop")
native_steps = partial(_program, "tensorflow_loops:native_steps_of_fit")
native_loop = partial(_program, "tensorflow_loops:native_loop")


def _one_device(backend: str) -> Iterator[Comparison]:
    one = fit(strategy="OneDeviceStrategy")
    # The same program with both strategies: two cases show it.
    for name, program, cases in (
        ("fit, OneDeviceStrategy", one, (MLP, TRANSFORMER)),
        ("fit, MirroredStrategy", fit(), ALL),
    ):
        yield Comparison(
            backend, name, KERAS, program, PLAIN_FIT, 0.98, cases, replicas=1
        )


def _dropout(
    backend: str, name: str, peer: str, theirs: Program, **options: Any
) -> Iterator[Comparison]:
    """Yield steps with one device's random numbers, and with each replica's own."""
    workers = 2 if options else 1
    for suffix, exact in ("", True), (", random numbers of its own", False):
        ours = fit(exact_random=exact, **options)
        yield Comparison(
            *(backend, name + suffix, peer, ours, theirs),
            cases=DROPOUT,
            workers=workers,
        )


def _batch_statistics(
    backend: str,
    name: str,
    program: Any,
    exact: str | None = None,
    local: str | None = "local",
    **rest: Any,
) -> Comparison:
    """Return steps with statistics of the global batch, beside each replica's."""
    ours, theirs = (program(batch_statistics=choice) for choice in (exact, local))
    name = f"{name}, statistics of the global batch"
    rest = {"cases": (NORMALIZED,), **rest}
    return Comparison(backend, name, "each replica's statistics", ours, theirs, **rest)


def _steps_per_execution(
    backend: str, name: str, program: Any, needs: str = ""
) -> Comparison:
    name = f"{name}, steps_per_execution=8"
    programs = program(steps_per_execution=8), program()
    peer = "one step per execution"
    return Comparison(backend, name, peer, *programs, cases=(MLP,), needs=needs)


def _virtual_replicas(backend: str) -> Comparison:
    name, peer = "fit, 2 processes, virtual_replicas=8", "2 replicas"
    programs = fit_of_workers(virtual_replicas=8), fit_of_workers()
    return Comparison(
        *(backend, name, peer, *programs), cases=(MLP, TRANSFORMER), workers=2
    )


def _jax() -> Iterator[Comparison]:
    row = partial(Comparison, "jax")
    eight = {"steps_per_execution": 8}
    yield from _one_device("jax")
    yield row(
        *("fit, MirroredStrategy", DATA_PARALLEL, fit(), DATA_PARALLEL_FIT, 1.0),
        cases=(MLP, TRANSFORMER, EMBEDDING),
    )
    yield row(
        *("run, distributed dataset", BY_HAND, loop(), JAX_LOOP, 0.95),
        cases=(MLP, CNN, TRANSFORMER, EMBEDDING),
    )
    yield row(
        *("run and reduce", BY_HAND, loop(reduces=True), JAX_LOOP, 0.9),
        cases=(MLP, EMBEDDING),
    )
    for name, program in (
        ("fit, MirroredStrategy", fit()),
        ("fit, steps_per_execution=8", fit(**eight)),
    ):
        yield row(name, BY_HAND, program, JAX_LOOP, 0.9, cases=(MLP,))
    yield row(
        "fit, steps_per_execution=8",
        f"{DATA_PARALLEL}, steps_per_execution=8",
        fit(**eight),
        Program(DATA_PARALLEL_FIT.function, eight),
        cases=(MLP,),
    )
    yield _steps_per_execution("jax", "fit", fit)
    yield row(
        *("fit, 2 processes", DATA_PARALLEL),
        *(fit_of_workers(), DATA_PARALLEL_OF_WORKERS),
        cases=(MLP,),
        workers=2,
        # A call has the Python code of 25 steps of ours, and of 7 of the peer's.
        min_steps=128,
    )
    yield _virtual_replicas("jax")
    # Of `fit` the statistics are those of the global batch anyway.
    yield _batch_statistics("jax", "run", loop, exact="global", local=None)


def _torch() -> Iterator[Comparison]:
    row = partial(Comparison, "torch")
    of_workers = partial(Comparison, "torch", workers=2)
    compiled = {"jit_compile": True}
    in_turns, processes = "fit, 2 replicas", "fit, 2 processes"
    yield from _one_device("torch")
    yield row(in_turns, KERAS, fit(), PLAIN_FIT, 0.95, (MLP, LARGE_MLP, CNN))
    yield from _dropout("torch", in_turns, KERAS, PLAIN_FIT)
    yield of_workers(processes, DDP, fit_of_workers(), DDP_LOOP, 0.97)
    yield of_workers(processes, DDP, fit_of_workers(), DDP_LOOP, cases=(WIDE_MLP,))
    yield of_workers(
        f"{processes}, gradients leave during backward",
        "when all are there",
        fit_of_workers(communication={"bytes_per_pack": 1 << 20}),
        fit_of_workers(),
        cases=(WIDE_MLP,),
    )
    yield from _dropout("torch", processes, DDP, DDP_LOOP, strategy=WORKERS)
    name = "fit compiled, 2 processes"
    yield of_workers(name, DDP, fit_of_workers(**compiled), DDP_LOOP, 1.0)
    yield of_workers(
        *(name, f"{DDP}, compiled", fit_of_workers(**compiled)),
        Program(DDP_LOOP.function, {"compiled": True}),
        cases=(MLP, CNN),
    )
    yield of_workers(
        "fit compiled by Inductor, 2 processes",
        "nn.Module under DDP, compiled",
        fit_of_workers(**compiled, compile_backend="inductor"),
        Program("torch_loops:module_loop", {"compiled": True}),
        cases=(MLP,),
    )
    yield row(
        *("fit compiled, 2 replicas", KERAS, fit(**compiled), PLAIN_FIT),
        cases=(MLP, LARGE_MLP, TRANSFORMER),
    )
    yield row(
        *("fit compiled, MirroredStrategy", f"{KERAS}, compiled"),
        *(fit(**compiled), Program(PLAIN_FIT.function, compiled)),
        cases=(MLP, TRANSFORMER),
        replicas=1,
    )
    for suffix, options in ("", {}), ("compiled", compiled):
        yield of_workers(
            f"fit {suffix}".strip() + ", 2 processes",
            DATA_PARALLEL + (f", {suffix}" if suffix else ""),
            fit_of_workers(**options),
            Program(DATA_PARALLEL_OF_WORKERS.function, options),
            cases=(MLP, TRANSFORMER),
            needs=KERAS_3_16,
        )
    yield _steps_per_execution("torch", "fit", fit, KERAS_3_16)
    yield of_workers(
        *("run, 2 processes", DDP, loop(strategy=WORKERS), DDP_LOOP, 0.97),
        cases=(MLP, CNN, TRANSFORMER, EMBEDDING),
    )
    yield of_workers(
        *(processes, "nn.Module under DDP", fit_of_workers()),
        Program("torch_loops:module_loop"),
        cases=(MLP, CNN),
    )
    yield _virtual_replicas("torch")
    yield _batch_statistics("torch", "fit", fit)
    normalized = (NORMALIZED, LARGE_NORMALIZED, RESNET50)
    yield _batch_statistics(
        "torch", processes, fit_of_workers, cases=normalized, workers=2
    )


def _tensorflow() -> Iterator[Comparison]:
    row = partial(Comparison, "tensorflow")
    yield from _one_device("tensorflow")
    yield from _dropout("tensorflow", "fit, 2 replicas", KERAS, PLAIN_FIT)
    name = "steps of fit, MirroredStrategy"
    yield row(
        *(name, f"Keras on {NATIVE}", steps_of_fit(), native_steps(), 1.0),
        cases=(MLP, CNN, TRANSFORMER),
    )
    yield row(
        *(name, f"Keras on {ONE_DEVICE_SUM}"),
        *(steps_of_fit(), native_steps(**SUM_ON_ONE), 1.0, (MLP,)),
    )
    name, of_run = "loop of `run`, MirroredStrategy", "tf.function of run on "
    loops = tensorflow_loop(), native_loop()
    yield row(name, of_run + NATIVE, *loops, 1.0, (MLP, CNN))
    loops = tensorflow_loop(), native_loop(**SUM_ON_ONE)
    yield row(name, of_run + ONE_DEVICE_SUM, *loops, 0.95, (MLP,))
    loops = tensorflow_loop(compiled=True), native_loop()
    name = "loop of a tf.function of `run`, MirroredStrategy"
    yield row(name, of_run + NATIVE, *loops, 1.0, (MLP,))
    loops = tensorflow_loop(strategy=WORKERS), native_loop(name=WORKERS)
    peer = f"{of_run}tf.distribute.{WORKERS}"
    yield row("loop of `run`, 2 processes", peer, *loops, 1.0, (MLP,), workers=2)
    yield _steps_per_execution("tensorflow", "steps of fit", steps_of_fit)
    yield _batch_statistics(
        *("tensorflow", "steps of fit", steps_of_fit),
        cases=(NORMALIZED, LARGE_NORMALIZED, RESNET50),
    )


COMPARISONS = (*_jax(), *_torch(), *_tensorflow())
