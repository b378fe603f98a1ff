"""Checks of `keras-strategy doctor`: whether training works here, or how to fix it."""

import argparse
import dataclasses
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from keras_strategy.cluster_resolver import detect

# `doctor_programs` prints these before its numbers.
DIFFERENCE = "largest difference:"
SUM = "sum over the workers:"
_PROGRAMS = "keras_strategy.launch.doctor_programs"
_BACKEND_PACKAGES = {"jax": "jax", "torch": "torch", "tensorflow": "tensorflow-cpu"}
_MAX_DIFFERENCE = 1e-5
_WORKERS = 2

# What a failed program prints, and how to fix it.
_ADVICE = {
    "KerasVersionError": "install a Keras that docs/keras_versions.md lists",
    "rendezvous": "set NPROC=8 before Python starts",
    "ModuleNotFoundError": "pip install the package that it names",
    "no result within": "allow more time with --timeout-seconds",
    "NCCL": "this torch has no NCCL: install a build with CUDA",
    "Address already in use": "end the program that listens at that port",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check, in words, and how to fix a failure."""

    check: str
    ok: bool
    detail: str
    advice: str = ""


def main(options: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    status = 0
    for finding in findings(options.timeout_seconds):
        mark = "[green]well [/]" if finding.ok else "[red]wrong[/]"
        detail = f"[bold]{finding.check}[/]: {escape(finding.detail)}"
        console.print(f"{mark} {detail}", highlight=False)
        if not finding.ok:
            console.print(f"      {escape(finding.advice)}", highlight=False)
            status = 1
    return status


def findings(timeout_seconds: float) -> Iterator[Finding]:
    """Run the checks in order; without a working backend only the first."""
    first = engine()
    yield first
    if not first.ok:
        return
    yield threads()
    gpu_finding = torch_gpus() if first.detail.endswith("torch") else None
    yield from filter(None, (gpu_finding, cluster()))
    yield replicas(timeout_seconds)
    yield workers(timeout_seconds)


def engine() -> Finding:
    """Check that Keras and its backend can be imported."""
    check = "engine"
    requested = os.environ.get("KERAS_BACKEND")
    choose = f"set KERAS_BACKEND to one of {', '.join(_BACKEND_PACKAGES)}"
    if requested is not None and requested not in _BACKEND_PACKAGES:
        detail = f"KERAS_BACKEND is {requested!r}, which does not train"
        return Finding(check, False, detail, choose)
    if requested is not None and importlib.util.find_spec(requested) is None:
        return Finding(
            check,
            False,
            f"KERAS_BACKEND is {requested!r}, and there is no such package",
            f"pip install {_BACKEND_PACKAGES[requested]}, or choose another backend",
        )
    program = "import keras; print(keras.__version__, keras.backend.backend())"
    output, status = _run(["-c", program], 120)
    if status:
        return Finding(check, False, _last_line(output), "repair the installation")
    version, backend = output.split()[-2:]
    detail = f"Keras {version} on {backend}"
    return Finding(check, backend in _BACKEND_PACKAGES, detail, choose)


def threads() -> Finding:
    count = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    devices = int(os.environ.get("KERAS_STRATEGY_LOGICAL_CPUS") or 2)
    return Finding(
        "threads",
        count >= devices,
        f"{count} for {devices} logical CPU devices",
        "set NPROC=8 before Python starts: otherwise JAX devices that wait for each "
        "other may abort the process",
    )


def torch_gpus() -> Finding | None:
    program = (
        "import torch; print(torch.cuda.device_count(), "
        "torch.distributed.is_nccl_available())"
    )
    output, status = _run(["-c", program], 120)
    words = output.split()[-2:]
    if status or len(words) != 2 or not words[0].isdecimal():
        return None  # the step on two replicas will report what is wrong
    return gpus(int(words[0]), words[1] == "True")


def gpus(count: int, nccl: bool) -> Finding | None:
    """Report how torch's replicas would use `count` GPUs, with or without NCCL."""
    if not count:
        return None
    detail = f"{count}, with NCCL" if nccl else f"{count}, and this torch has no NCCL"
    if nccl and count > 1:
        detail += (
            "; replicas of one process take turns: to have them compute in parallel, "
            f"keras-strategy run --workers {count} with MultiWorkerMirroredStrategy"
        )
    return Finding("GPUs", nccl, detail, "install a build of torch with CUDA and NCCL")


def cluster() -> Finding | None:
    """Check that this worker of a cluster can listen at its address."""
    check = "cluster"
    chosen = detect().chosen
    if chosen is None:
        return None
    name = chosen.name
    try:
        resolver = chosen.make_resolver()
        address = resolver.cluster_spec().task_address(
            resolver.task_type or "worker", resolver.task_id or 0
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        detail = f"{name} cannot be used: {error}"
        return Finding(check, False, detail, "correct what it names")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return Finding(check, True, f"{name}: this is {resolver.task_type}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
        except OSError as error:
            return Finding(
                check,
                False,
                f"{name}: cannot listen at port {port} of {host}: {error.strerror}",
                "end the program that listens there, or choose another port",
            )
    return Finding(check, True, f"{name}: port {port} is free")


def replicas(timeout_seconds: float) -> Finding:
    check = "a step on two replicas"
    program = ["-m", _PROGRAMS, "replicas"]
    output, status = _run(program, timeout_seconds, is_isolated=True)
    number = re.search(f"{DIFFERENCE} (\\S+)", output)
    if status or number is None:
        return _failure(check, output, status)
    difference = float(number[1])
    return Finding(
        check,
        difference <= _MAX_DIFFERENCE,
        f"{difference:.0e} from one device",
        "this is a bug: please report it with the output of keras-strategy info",
    )


def workers(timeout_seconds: float) -> Finding:
    check = f"a sum over {_WORKERS} processes"
    run = ["-m", "keras_strategy", "run", "--workers", str(_WORKERS)]
    program = [*run, "-m", _PROGRAMS, "workers"]
    output, status = _run(program, timeout_seconds, is_isolated=True)
    sums = re.findall(f"{SUM} (\\S+)", output)
    if status or len(sums) != _WORKERS:
        return _failure(check, output, status)
    return Finding(check, True, f"{sums[0]} on each")


def _failure(check: str, output: str, status: int) -> Finding:
    errors = re.findall(r"^.*?(\w+(?:Error|Exception): .+)$", output, re.MULTILINE)
    detail = errors[-1] if errors else f"{_last_line(output)} (exit code {status})"
    advice = "keras-strategy info shows the setup; the message names what failed"
    known = (fix for text, fix in _ADVICE.items() if text in output)
    return Finding(check, False, detail, next(known, advice))


def _run(
    arguments: list[str], timeout_seconds: float, is_isolated: bool = False
) -> tuple[str, int]:
    """Run Python, perhaps without this cluster; return its output and exit code."""
    environment = dict(os.environ)
    if is_isolated:
        environment.setdefault("NPROC", "8")
        for name in ("KERAS_STRATEGY_LOGICAL_CPUS", "TF_CONFIG"):
            environment.pop(name, None)
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
        return f"no result within {timeout_seconds:g} s", -1
    return done.stdout, done.returncode


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without output"
