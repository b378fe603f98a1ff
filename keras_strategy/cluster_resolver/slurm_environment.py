"""Variables of a Slurm job step, and the lists in them."""

from __future__ import annotations

import os
import re

from keras_strategy.cluster_resolver.checks import as_int
from keras_strategy.cluster_resolver.extras import import_extra

_REPEATED = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,5})\))?", re.ASCII)
_MAX_NODES = 100_000


def step_variable(name: str) -> str:
    """Return a step_variable of the job step; raise RuntimeError outside of one."""
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(
            f"{name} not found in environment. Not running inside a Slurm step? "
            "Start the program with `srun`, also inside `sbatch` and `salloc`. "
            f"Received: {value!r}"
        )
    return value


def step_integer(name: str) -> int:
    """Return a variable of the job step that is an integer."""
    return as_int(step_variable(name), name)


def step_hosts() -> list[str]:
    """Return the nodes of the step, in the order of the ranks."""
    return expand_hostlist(step_variable("SLURM_STEP_NODELIST"))


def step_tasks_per_node() -> list[int]:
    """Return the number of tasks on each node of the step."""
    return expand_tasks_per_node(step_variable("SLURM_STEP_TASKS_PER_NODE"))


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of an expression such as "n[1-2],m5,o[03-04,6]", in its order.

    Raises:
        ValueError: If it is not a host list.
        ImportError: If the extra `slurm` is not installed.
    """
    library = import_extra("hostlist", "slurm", "SlurmClusterResolver")
    try:
        # Keep duplicates: without one, the following ranks would shift.
        result = library.expand_hostlist(hostlist, allow_duplicates=True)
    except (library.BadHostlist, RecursionError, ValueError) as error:
        raise ValueError(
            "Expected the environment variable SLURM_STEP_NODELIST to be a host list "
            f'like "node[1-3,07],login". Received: {hostlist[:200]!r} ({error})'
        ) from None
    if len(set(result)) != len(result):
        raise ValueError(
            "Expected every node once in SLURM_STEP_NODELIST. Received: "
            f"{hostlist[:200]!r}"
        )
    return result


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the numbers of an expression such as "3(x2),2,1", or raise ValueError."""
    result: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or len(result) > _MAX_NODES:
            raise ValueError(
                "Expected the environment variable SLURM_STEP_TASKS_PER_NODE to be "
                f'like "2(x3),1". Received: {text[:200]!r}'
            )
        result.extend([int(match[1])] * int(match[2] or 1))
    return result
