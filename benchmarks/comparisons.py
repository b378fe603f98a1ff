"""Table of comparisons, which imports no backend.

A program is named by its module and function, "ours:mirrored_fit". The two of a
comparison run in processes of their own (`benchmarks.side`), and modules of peers never
import `keras_strategy`.
"""

from dataclasses import dataclass

MLP = "MLP, batch 128"
LARGE_MLP = "MLP, batch 1024"
WIDE_MLP = "wide MLP"
CNN = "CNN"
NORMALIZED = "CNN with BatchNormalization"
TRANSFORMER = "transformer"
EMBEDDING = "embedding"
ALL = (MLP, LARGE_MLP, CNN, TRANSFORMER, EMBEDDING)
DROPOUT = ("MLP with Dropout", "transformer with Dropout")


@dataclass(frozen=True)
class Comparison:
    """Ours and a peer.

    Attributes:
        backend: The Keras backend of both.
        name: What of ours it is, such as "fit".
        peer: The peer's name.
        programs: What makes the two programs of a case, ours first.
        aim: What the ratio shall be at least; None where the peer is shown alone.
        replicas: The replicas of ours.
        workers: The processes of each side.
        cases: The names of its cases. To compile takes longer than to measure, so not
            every comparison has all.
        catalog: The module of `benchmarks` that has these cases.
        both_ours: Whether the peer is a program of ours, too.
        min_steps: The steps of a long turn at least. The difference of two short turns
            is noise if a call varies by more than a step takes.
        needs: A file of the Keras versions that can run both programs.
    """

    backend: str
    name: str
    peer: str
    programs: tuple[str, str]
    aim: float | None
    replicas: int = 2
    workers: int = 1
    cases: tuple[str, ...] = ALL
    catalog: str = "cases"
    both_ours: bool = False
    min_steps: int = 8
    needs: str = ""

    @property
    def devices(self) -> int:
        """The devices of each process."""
        return self.replicas // self.workers


BACKENDS = ("jax", "torch", "tensorflow")
PLAIN = "programs:plain_fit"
BY_HAND = "jax.jit over a mesh, by hand"
DDP = "Keras under DDP"
NATIVE = "tf.distribute.MirroredStrategy"
DATA_PARALLEL = "keras.distribution.DataParallel"
# With `DataParallel` and `steps_per_execution` on torch.
KERAS_3_16 = "src/backend/torch/distribution_lib.py"
ONE_DEVICE_SUM = f"{NATIVE}, ReductionToOneDevice"


def _batch_statistics(
    backend: str, name: str, ours: str, own_rows: str, workers: int = 1
) -> Comparison:
    """Compare steps with and without statistics of the global batch."""
    return Comparison(
        backend,
        f"{name}, statistics of the global batch",
        "each replica's statistics",
        (ours, own_rows),
        None,
        workers=workers,
        cases=(NORMALIZED,),
        both_ours=True,
    )


def _one_device(backend: str) -> tuple[Comparison, ...]:
    return (
        Comparison(
            backend,
            "fit, OneDeviceStrategy",
            "plain Keras",
            ("ours:one_device_fit", PLAIN),
            0.98,
            replicas=1,
            # The same program as below: two cases show it.
            cases=(MLP, TRANSFORMER),
        ),
        Comparison(
            backend,
            "fit, MirroredStrategy",
            "plain Keras",
            ("ours:one_replica_fit", PLAIN),
            0.98,
            replicas=1,
        ),
    )


def _dropping(
    backend: str, name: str, peer: str, programs: tuple[str, str], workers: int = 1
) -> tuple[Comparison, ...]:
    """Compare steps with and without one device's random numbers."""
    ours, theirs = programs
    own = f"{ours}_drawing_own"
    return (
        Comparison(backend, name, peer, programs, None, 2, workers, DROPOUT),
        Comparison(
            backend,
            f"{name}, random numbers of its own",
            peer,
            (own, theirs),
            None,
            2,
            workers,
            DROPOUT,
        ),
    )


def _steps_per_execution(
    backend: str, name: str, ours: str, single: str, needs: str = ""
) -> Comparison:
    return Comparison(
        backend,
        f"{name}, steps_per_execution=8",
        "one step per execution",
        (ours, single),
        None,
        cases=(MLP,),
        both_ours=True,
        needs=needs,
    )


JAX = (
    *_one_device("jax"),
    Comparison(
        "jax",
        "fit, MirroredStrategy",
        DATA_PARALLEL,
        ("ours:mirrored_fit", "programs:keras_data_parallel"),
        1.0,
        cases=(MLP, TRANSFORMER, EMBEDDING),
    ),
    Comparison(
        "jax",
        "run, distributed dataset",
        BY_HAND,
        ("jax_ours:run_loop", "jax_peers:by_hand"),
        0.95,
        cases=(MLP, CNN, TRANSFORMER, EMBEDDING),
    ),
    Comparison(
        "jax",
        "run and reduce",
        BY_HAND,
        ("jax_ours:run_and_reduce_loop", "jax_peers:by_hand"),
        0.9,
        cases=(MLP, EMBEDDING),
    ),
    Comparison(
        "jax",
        "fit, MirroredStrategy",
        BY_HAND,
        ("ours:mirrored_fit", "jax_peers:by_hand"),
        0.9,
        cases=(MLP,),
    ),
    Comparison(
        "jax",
        "fit, steps_per_execution=8",
        BY_HAND,
        ("ours:mirrored_fit_of_8", "jax_peers:by_hand"),
        0.9,
        cases=(MLP,),
    ),
    Comparison(
        "jax",
        "fit, steps_per_execution=8",
        f"{DATA_PARALLEL}, steps_per_execution=8",
        ("ours:mirrored_fit_of_8", "programs:keras_data_parallel_of_8"),
        None,
        cases=(MLP,),
    ),
    _steps_per_execution("jax", "fit", "ours:mirrored_fit_of_8", "ours:mirrored_fit"),
    Comparison(
        "jax",
        "fit, 2 processes",
        DATA_PARALLEL,
        ("ours:workers_fit", "programs:data_parallel_of_workers"),
        None,
        workers=2,
        cases=(MLP,),
        # A call has the Python code of 25 steps of ours, and of 7 of the peer's.
        min_steps=128,
    ),
    # Of `fit` the statistics are those of the global batch anyway.
    _batch_statistics(
        "jax", "run", "jax_ours:run_loop_of_global_statistics", "jax_ours:run_loop"
    ),
)


def _beside_keras(name: str, peer: str, programs: tuple[str, str]) -> Comparison:
    """Compare workers on torch with those of Keras itself."""
    return Comparison(
        "torch",
        f"{name}, 2 processes",
        peer,
        programs,
        None,
        workers=2,
        cases=(MLP, TRANSFORMER),
        needs=KERAS_3_16,
    )


TORCH = (
    *_one_device("torch"),
    Comparison(
        "torch",
        "fit, 2 replicas",
        "plain Keras",
        ("ours:mirrored_fit", PLAIN),
        0.95,
        cases=(MLP, LARGE_MLP, CNN),
    ),
    *_dropping("torch", "fit, 2 replicas", "plain Keras", ("ours:mirrored_fit", PLAIN)),
    Comparison(
        "torch",
        "fit, 2 processes",
        DDP,
        ("ours:workers_fit", "torch_peers:keras_under_ddp"),
        0.97,
        workers=2,
    ),
    Comparison(
        "torch",
        "fit, 2 processes",
        DDP,
        ("ours:workers_fit", "torch_peers:keras_under_ddp"),
        None,
        workers=2,
        cases=(WIDE_MLP,),
    ),
    Comparison(
        "torch",
        "fit, 2 processes, gradients leave during backward",
        "when all are there",
        ("torch_ours:workers_fit_during_backward", "ours:workers_fit"),
        None,
        workers=2,
        cases=(WIDE_MLP,),
        both_ours=True,
    ),
    *_dropping(
        "torch",
        "fit, 2 processes",
        DDP,
        ("ours:workers_fit", "torch_peers:keras_under_ddp"),
        workers=2,
    ),
    Comparison(
        "torch",
        "fit compiled, 2 processes",
        DDP,
        ("torch_ours:workers_compiled_fit", "torch_peers:keras_under_ddp"),
        1.0,
        workers=2,
    ),
    Comparison(
        "torch",
        "fit compiled, 2 processes",
        f"{DDP}, compiled",
        ("torch_ours:workers_compiled_fit", "torch_peers:compiled_keras_under_ddp"),
        None,
        workers=2,
        cases=(MLP, CNN),
    ),
    Comparison(
        "torch",
        "fit compiled by Inductor, 2 processes",
        "nn.Module under DDP, compiled",
        ("torch_ours:workers_fit_by_inductor", "torch_peers:compiled_torch_under_ddp"),
        None,
        workers=2,
        cases=(MLP,),
    ),
    Comparison(
        "torch",
        "fit compiled, 2 replicas",
        "plain Keras",
        ("torch_ours:mirrored_compiled_fit", PLAIN),
        None,
        cases=(MLP, LARGE_MLP, TRANSFORMER),
    ),
    Comparison(
        "torch",
        "fit compiled, MirroredStrategy",
        "plain Keras, compiled",
        ("torch_ours:one_replica_compiled_fit", "programs:plain_compiled_fit"),
        None,
        replicas=1,
        cases=(MLP, TRANSFORMER),
    ),
    _beside_keras(
        "fit",
        DATA_PARALLEL,
        ("ours:workers_fit", "programs:data_parallel_of_workers"),
    ),
    _beside_keras(
        "fit compiled",
        f"{DATA_PARALLEL}, compiled",
        (
            "torch_ours:workers_compiled_fit",
            "programs:compiled_data_parallel_of_workers",
        ),
    ),
    _steps_per_execution(
        "torch", "fit", "ours:mirrored_fit_of_8", "ours:mirrored_fit", KERAS_3_16
    ),
    Comparison(
        "torch",
        "run, 2 processes",
        DDP,
        ("torch_ours:workers_run_loop", "torch_peers:keras_under_ddp"),
        0.97,
        workers=2,
        cases=(MLP, CNN, TRANSFORMER, EMBEDDING),
    ),
    Comparison(
        "torch",
        "fit, 2 processes",
        "nn.Module under DDP",
        ("ours:workers_fit", "torch_peers:torch_under_ddp"),
        None,
        workers=2,
        cases=(MLP, CNN),
    ),
    _batch_statistics(
        "torch", "fit", "ours:mirrored_fit", "ours:fit_of_local_statistics"
    ),
    _batch_statistics(
        "torch",
        "fit, 2 processes",
        "ours:workers_fit",
        "ours:workers_fit_of_local_statistics",
        workers=2,
    ),
)

TENSORFLOW = (
    *_one_device("tensorflow"),
    *_dropping(
        "tensorflow", "fit, 2 replicas", "plain Keras", ("ours:mirrored_fit", PLAIN)
    ),
    Comparison(
        "tensorflow",
        "steps of fit, MirroredStrategy",
        f"Keras on {NATIVE}",
        ("tensorflow_ours:steps_of_fit", "tensorflow_peers:steps_of_native_fit"),
        1.0,
        cases=(MLP, CNN, TRANSFORMER),
    ),
    Comparison(
        "tensorflow",
        "steps of fit, MirroredStrategy",
        f"Keras on {ONE_DEVICE_SUM}",
        (
            "tensorflow_ours:steps_of_fit",
            "tensorflow_peers:steps_of_native_fit_on_one_device",
        ),
        1.0,
        cases=(MLP,),
    ),
    Comparison(
        "tensorflow",
        "loop of `run`, MirroredStrategy",
        f"tf.function of run on {NATIVE}",
        ("tensorflow_ours:run_loop", "tensorflow_peers:native_loop"),
        1.0,
        cases=(MLP, CNN),
    ),
    Comparison(
        "tensorflow",
        "loop of `run`, MirroredStrategy",
        f"tf.function of run on {ONE_DEVICE_SUM}",
        ("tensorflow_ours:run_loop", "tensorflow_peers:native_loop_on_one_device"),
        0.95,
        cases=(MLP,),
    ),
    Comparison(
        "tensorflow",
        "loop of a tf.function of `run`, MirroredStrategy",
        f"tf.function of run on {NATIVE}",
        ("tensorflow_ours:loop_of_a_function", "tensorflow_peers:native_loop"),
        1.0,
        cases=(MLP,),
    ),
    Comparison(
        "tensorflow",
        "loop of `run`, 2 processes",
        "tf.function of run on tf.distribute.MultiWorkerMirroredStrategy",
        ("tensorflow_ours:workers_loop", "tensorflow_peers:native_loop_of_workers"),
        1.0,
        workers=2,
        cases=(MLP,),
    ),
    _steps_per_execution(
        "tensorflow",
        "steps of fit",
        "tensorflow_ours:steps_of_fit_of_8",
        "tensorflow_ours:steps_of_fit",
    ),
    _batch_statistics(
        "tensorflow",
        "steps of fit",
        "tensorflow_ours:steps_of_fit",
        "tensorflow_ours:steps_of_fit_of_local_statistics",
    ),
)

COMPARISONS = (*JAX, *TORCH, *TENSORFLOW)
