"""Systems that train programs, a module for each way of using one.

A module has `run(program, replicas, initial)`, which returns the final weights and the
logs of each epoch. It may have `prepare(replicas)`, which configures the process before
Keras uses a device.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class System:
    """A way to train, in one environment.

    Attributes:
        name: The argument of `--system`.
        title: The heading of its column.
        backend: The Keras backend.
        module: The module of this package that runs it.
        page: The documentation that the module follows.
        environment: The folder of packages that it needs, or "".
        processes: True if each replica is a process.
    """

    name: str
    title: str
    backend: str
    module: str
    page: str
    environment: str = ""
    processes: bool = False


_KERAS = "https://keras.io/guides"
_TITLES = {"jax": "JAX", "torch": "torch", "tensorflow": "TensorFlow"}


def _system(
    name: str, title: str, backend: str, module: str, page: str, *options: Any
) -> System:
    return System(name, f"{title}, {_TITLES[backend]}", backend, module, page, *options)


_LIST = [
    *(
        _system(f"keras_strategy-{b}", "keras_strategy", b, "strategy", "fit.md")
        for b in _TITLES
    ),
    _system(
        *("data_parallel-jax", "Keras DataParallel", "jax", "data_parallel_jax"),
        "https://keras.io/api/distribution/data_parallel/",
    ),
    *(
        _system(
            *(f"data_parallel-{b}-nightly", "Keras 3.16 DataParallel", b),
            *(f"data_parallel_{b}", f"{_KERAS}/distribution/", "nightly", b == "torch"),
        )
        for b in ("jax", "torch")
    ),
    _system(
        *("tf_distribute", "tf.distribute", "tensorflow", "mirrored"),
        f"{_KERAS}/distributed_training_with_tensorflow/",
    ),
    _system(
        *("ddp", "DDP by hand", "torch", "ddp"),
        *(f"{_KERAS}/distributed_training_with_torch/", "", True),
    ),
    _system(
        *("accelerate", "Accelerate", "torch", "accelerate"),
        *("https://huggingface.co/docs/accelerate/quicktour", "accelerate", True),
    ),
    _system(
        *("fabric", "Lightning Fabric", "torch", "fabric"),
        "https://lightning.ai/docs/fabric/stable/fundamentals/convert.html",
        *("fabric", True),
    ),
]
ALL = {system.name: system for system in _LIST}


def select(names: list[str]) -> list[System]:
    """Return the systems of these names, or whose name begins with one and a dash.

    Raises:
        ValueError: If there is no such system.
    """
    found = []
    for name in names or list(ALL):
        matches = [s for s in _LIST if s.name.startswith(f"{name}-")]
        if name in ALL:
            matches = [ALL[name]]
        if not matches:
            raise ValueError(
                "Expected `--system` to be a system, or the start of one up to a dash. "
                f"Received: {name!r}. Systems: {', '.join(ALL)}"
            )
        found += matches
    return found
