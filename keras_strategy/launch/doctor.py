"""`keras-strategy doctor`: does training work here, and if not, what is to be done."""

import dataclasses
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from keras_strategy.cluster_resolver import detect

# What the trials print in front of their numbers.
DIFFERENCE = "largest difference:"
SUM = "sum over the workers:"
_TRIAL = "keras_strategy.launch.doctor_programs"
_ENGINES = {"jax": "jax", "torch": "torch", "tensorflow": "tensorflow-cpu"}
_DIFFERENCE_ALLOWED = 1e-5
_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was looked at, and what was seen.

    Args:
        what: What was looked at.
        well: Whether it is as it should be.
        seen: What was seen, in words.
        do: What helps, if it is not well.
    """

    what: str
    well: bool
    seen: str
    do: str = ""


def findings(timeout_seconds: float) -> Iterator[Finding]:
    """Looks at one thing after the other, and at none that needs what is missing.

    Args:
        timeout_seconds: How long a trial may take.
    """
    first = engine()
    yield first
    if not first.well:
        return
    yield threads()
    of_torch = torch_gpus() if first.seen.endswith("torch") else None
    for found in (of_torch, cluster()):
        if found is not None:
            yield found
    for trial in (replicas, workers):
        yield trial(timeout_seconds)


def engine() -> Finding:
    """Whether Keras and its engine can be imported."""
    asked = os.environ.get("KERAS_BACKEND")
    if asked is not None and asked not in _ENGINES:
        return Finding(
            "engine",
            False,
            f"KERAS_BACKEND is {asked!r}, which does not train",
            f"set KERAS_BACKEND to one of {', '.join(_ENGINES)}",
        )
    if asked is not None and importlib.util.find_spec(asked) is None:
        return Finding(
            "engine",
            False,
            f"KERAS_BACKEND is {asked!r}, and there is no such package",
            f"pip install {_ENGINES[asked]}, or choose another backend",
        )
    output, status = _ended(
        ["-c", "import keras; print(keras.__version__, keras.backend.backend())"], 120
    )
    if status:
        return Finding("engine", False, _last_line(output), "repair the installation")
    version, backend = output.split()[-2:]
    return Finding(
        "engine",
        backend in _ENGINES,
        f"Keras {version} on {backend}",
        "set KERAS_BACKEND to one of " + ", ".join(_ENGINES),
    )


def threads() -> Finding:
    """Whether XLA has a thread for each logical device, where they are asked for."""
    there = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    devices = int(os.environ.get("KERAS_STRATEGY_LOGICAL_CPUS") or 2)
    return Finding(
        "threads",
        there >= devices,
        f"{there} for {devices} logical CPU devices",
        "set NPROC=8 before Python starts: on JAX devices that wait for each other may "
        "else abort the process",
    )


def torch_gpus() -> Finding | None:
    """How replicas would use the GPUs that torch sees, if there are some."""
    asked = "import torch as t; print(t.cuda.device_count(), t.distributed.is_nccl_"
    output, status = _ended(["-c", asked + "available())"], 120)
    words = output.split()[-2:]
    if status or len(words) != 2 or not words[0].isdecimal():
        return None  # the step on two replicas will say what is wrong
    return gpus(int(words[0]), words[1] == "True")


def gpus(count: int, nccl: bool) -> Finding | None:
    """How torch's replicas would use GPUs.

    Args:
        count: How many there are.
        nccl: Whether torch was built with what lets processes add up on GPUs.
    """
    if not count:
        return None
    seen = f"{count}, with NCCL" if nccl else f"{count}, and this torch has no NCCL"
    if nccl and count > 1:
        seen += (
            "; replicas of one process take turns: to have them compute at once, "
            f"keras-strategy run --workers {count} with MultiWorkerMirroredStrategy"
        )
    return Finding("GPUs", nccl, seen, "install a build of torch with CUDA and NCCL")


def cluster() -> Finding | None:
    """Whether this worker of a cluster can listen where the others look for it."""
    detection = detect()
    if detection.chosen is None:
        return None
    name = detection.chosen.name
    try:
        resolver = detection.resolver()
        assert resolver is not None
        address = resolver.cluster_spec().task_address(
            resolver.task_type or "worker", resolver.task_id or 0
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return Finding(
            "cluster", False, f"{name} cannot be used: {error}", "mend what it names"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return Finding("cluster", True, f"{name}: this is {resolver.task_type}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
        except OSError as error:
            return Finding(
                "cluster",
                False,
                f"{name}: nobody can listen at port {port} of {host}: {error.strerror}",
                "end what listens there, or choose another port",
            )
    return Finding("cluster", True, f"{name}: port {port} is free")


def replicas(timeout_seconds: float) -> Finding:
    """Whether two replicas train, and end with what one device ends with.

    Args:
        timeout_seconds: How long it may take.
    """
    what = "a step on two replicas"
    output, status = _trial(["-m", _TRIAL, "replicas"], timeout_seconds)
    number = re.search(f"{DIFFERENCE} (\\S+)", output)
    if status or number is None:
        return Finding(what, False, _why(output, status), _do_about(output))
    difference = float(number[1])
    return Finding(
        what,
        difference <= _DIFFERENCE_ALLOWED,
        f"{difference:.0e} from one device",
        "this is a bug: please report it with the output of keras-strategy info",
    )


def workers(timeout_seconds: float) -> Finding:
    """Whether two processes of this machine find each other and add up.

    Args:
        timeout_seconds: How long it may take.
    """
    what = f"a sum over {_WORKERS} processes"
    run = ["-m", "keras_strategy", "run", "--workers", str(_WORKERS)]
    output, status = _trial([*run, "-m", _TRIAL, "workers"], timeout_seconds)
    sums = re.findall(f"{SUM} (\\S+)", output)
    if status or len(sums) != _WORKERS:
        return Finding(what, False, _why(output, status), _do_about(output))
    return Finding(what, True, f"{sums[0]} on each")


def _trial(arguments: list[str], timeout_seconds: float) -> tuple[str, int]:
    """A process that knows nothing of this one's cluster and logical devices."""
    environment = {"NPROC": "8", **os.environ}
    for name in ("KERAS_STRATEGY_LOGICAL_CPUS", "TF_CONFIG"):
        environment.pop(name, None)
    return _ended(arguments, timeout_seconds, environment)


def _ended(
    arguments: list[str],
    timeout_seconds: float,
    environment: dict[str, str] | None = None,
) -> tuple[str, int]:
    """What a Python process writes, and its exit code."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing came within {timeout_seconds:g} s", -1
    return done.stdout, done.returncode


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


def _why(output: str, status: int) -> str:
    errors = re.findall(r"^.*?(\w+(?:Error|Exception): .+)$", output, re.MULTILINE)
    return errors[-1] if errors else f"{_last_line(output)} (exit code {status})"


# What is said by whom, and what helps.
_ADVICE: tuple[tuple[str, str], ...] = (
    ("KerasVersionError", "install a Keras that docs/keras_versions.md lists"),
    ("rendezvous", "set NPROC=8 before Python starts"),
    ("ModuleNotFoundError", "pip install the package that it names"),
    ("nothing came within", "give it longer with --timeout-seconds"),
    ("NCCL", "this torch has no NCCL: install a build with CUDA"),
    ("Address already in use", "end what listens at the port that it names"),
)


def _do_about(output: str) -> str:
    for said, advice in _ADVICE:
        if said in output:
            return advice
    return "keras-strategy info says what there is; the message says what failed"


def run(timeout_seconds: float, show: Callable[[Finding], None]) -> int:
    """Looks at everything.

    Args:
        timeout_seconds: How long a trial may take.
        show: Called with each finding, when it is known.

    Returns:
        The exit status: 1 if something is not well.
    """
    status = 0
    for finding in findings(timeout_seconds):
        show(finding)
        status |= not finding.well
    return int(status)
