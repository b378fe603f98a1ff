"""The sections of a run on GPUs: what they are, with no engine imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part of a run.

    Attributes:
        title: What the report calls it.
        rows: The function of `benchmarks.gpu.sections` that yields its rows.
        seconds: How long it may take.
        backends: Where it is run.
        gpus: How many GPUs it needs.
        timed: Whether nothing else may run meanwhile.
        divided: Whether its own process has two CPU devices in a rehearsal.
    """

    title: str
    rows: str
    seconds: int
    backends: tuple[str, ...] = ("jax", "torch", "tensorflow")
    gpus: int = 1
    timed: bool = True
    divided: bool = False


TENSORFLOW = ("tensorflow",)
SECTIONS = (
    Section("equality", "equality", 120, timed=False, divided=True),
    Section(
        *("two logical GPUs", "logical", 120, ("torch", "tensorflow")),
        timed=False,
        divided=True,
    ),
    Section("two processes, one GPU", "workers_on_one_gpu", 60, timed=False),
    Section("sharding, two processes, one GPU", "sharding", 110, ("torch",)),
    Section("two processes, two GPUs", "workers_by_nccl", 80, gpus=2),
    Section("one GPU: ratios", "ratios", 110),
    Section("two logical GPUs: ratio", "logical_speed", 60, TENSORFLOW),
    Section("overlap", "overlap", 90, ("torch",), gpus=2),
)
