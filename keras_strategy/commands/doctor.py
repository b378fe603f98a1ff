"""Checks of `keras-strategy doctor`: whether training works here, or how to fix it.

Some run this file as a program in processes of their own: only those import Keras.
"""

import argparse
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from keras_strategy.cluster_resolver import detect
from keras_strategy.commands import worker_checks
from keras_strategy.commands.findings import Finding, report
from keras_strategy.commands.processes import run_python

# The programs print these before their numbers.
_DIFFERENCE = "largest difference:"
_SUM = "sum over the workers:"
_PROGRAMS = "keras_strategy.commands.doctor"
_BACKENDS = "jax", "torch", "tensorflow"
_CHOOSE = f"set KERAS_BACKEND to one of {', '.join(_BACKENDS)}"
_MAX_DIFFERENCE = 1e-5
_WORKERS = 2
_CPUS_ONLY = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
# Versions with which the test suite has run: docs/versions.md has the results.
_TESTED = {
    "python": ("3.11", "3.13"),
    "keras": ("3.13", "3.16"),
    "jax": ("0.10", "0.12"),
    "torch": ("2.13", "2.15"),
    "tensorflow": ("2.21", "2.22"),
}

# What a failed program prints, and how to fix it.
_ADVICE = {
    "KerasVersionError": "install a Keras that docs/versions.md lists",
    "rendezvous": "set NPROC=8 before Python starts",
    "ModuleNotFoundError": "pip install the package that it names (tensorflow-cpu for "
    "tensorflow), or choose another backend",
    "no result within": "allow more time with --timeout-seconds",
    "have NCCL built in": "install a build of torch with CUDA and NCCL",
    "Address already in use": "end the program that listens at that port",
}


def main(options: argparse.Namespace) -> int:
    seconds = options.timeout_seconds
    if options.workers:
        return worker_checks.main(seconds or worker_checks.TIMEOUT_SECONDS)
    return report(findings(180 if seconds is None else seconds))


def findings(timeout_seconds: float) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order; without a working backend only the first."""
    first = backend()
    yield "backend", first
    if first.ok is False:
        return
    yield "threads", threads()
    if " on torch " in first.detail and (found := torch_gpus()):
        yield "GPUs", found
    if found := cluster():
        yield "cluster", found
    yield "training step", replicas(timeout_seconds)
    yield "collectives", workers(timeout_seconds)


def backend() -> Finding:
    requested = os.environ.get("KERAS_BACKEND")
    if requested is not None and requested not in _BACKENDS:
        detail = f"KERAS_BACKEND is {requested!r}, which does not train"
        return Finding(False, detail, _CHOOSE)
    program = (
        "import keras, sys; name = keras.backend.backend(); module = sys.modules[name]"
        "; print(keras.__version__, name, getattr(module, '__version__', 0))"
    )
    output, status = _run(["-c", program], 120)
    if status:
        return _failure(output, status)
    return versions(*output.split()[-3:])


def versions(keras: str, name: str, version: str) -> Finding:
    tested, untested = compare_versions(keras, name, version)
    detail = f"Keras {keras} on {name} {version}"
    if name not in _BACKENDS:
        return Finding(False, detail, _CHOOSE)
    if not untested:
        return Finding(True, f"{detail}; tested: {tested}")
    detail += f"; not tested: {', '.join(untested)}"
    return Finding(None, detail, f"if something fails, install {tested}")


def compare_versions(keras: str, backend: str, version: str) -> tuple[str, list[str]]:
    """Return the tested versions, and the installed ones that are not among them."""
    tested, untested = [], []
    installed = {"python": platform.python_version(), "keras": keras, backend: version}
    for name, found in installed.items():
        first, last = _TESTED.get(name, ("0", "0"))
        tested.append(f"{name} {first} to {last}")
        if not _numbers(first) <= _numbers(found) <= _numbers(last):
            untested.append(f"{name} {found}")
    return ", ".join(tested), untested


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def threads() -> Finding:
    count = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    devices = int(os.environ.get("KERAS_STRATEGY_LOGICAL_CPUS") or 2)
    return Finding(
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
        return None  # the training step reports the error
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
    return Finding(nccl, detail, "install a build of torch with CUDA and NCCL")


def cluster() -> Finding | None:
    """Check that this worker of a cluster can listen at its address."""
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
        return Finding(False, detail, "correct what it names")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return Finding(True, f"{name}: this is {resolver.task_type}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
        except OSError as error:
            return Finding(
                False,
                f"{name}: cannot listen at port {port} of {host}: {error.strerror}",
                "end the program that listens there, or choose another port",
            )
    return Finding(True, f"{name}: port {port} is free")


def replicas(timeout_seconds: float) -> Finding:
    program = ["-m", _PROGRAMS, "replicas"]
    output, status = _run(program, timeout_seconds, is_isolated=True)
    number = re.search(f"{_DIFFERENCE} (\\S+)", output)
    if status or number is None:
        return _failure(output, status)
    difference = float(number[1])
    matches = difference <= _MAX_DIFFERENCE
    return Finding(
        matches,
        f"2 replicas {'match' if matches else 'differ from'} 1 device (largest "
        f"difference {difference:.0e})",
        "this is a bug: please report it with the output of keras-strategy info",
    )


def workers(timeout_seconds: float) -> Finding:
    run = ["-m", "keras_strategy", "run", "--workers", str(_WORKERS)]
    program = [*run, "-m", _PROGRAMS, "workers"]
    # NCCL refuses two processes on one GPU.
    shares_gpu = _count_gpus() == 1
    hides_gpus = _CPUS_ONLY if shares_gpu else {}
    output, status = _run(program, timeout_seconds, is_isolated=True, more=hides_gpus)
    sums = re.findall(f"{_SUM} (\\S+)", output)
    if status or len(sums) != _WORKERS:
        return _failure(output, status)
    place = ", on CPUs, since there is one GPU" if shares_gpu else ""
    detail = f"all-reduce over {_WORKERS} processes returned {sums[0]} on each{place}"
    return Finding(True, detail)


def _count_gpus() -> int:
    """Return the number of GPUs that the backend finds; 0 if it fails."""
    program = (
        "from keras_strategy.core.registry import get_engine; "
        "print(len(get_engine().list_devices('gpu')))"
    )
    output, status = _run(["-c", program], 120)
    return 0 if status else int(output.split()[-1])


def _failure(output: str, status: int) -> Finding:
    errors = re.findall(r"^.*?(\w+(?:Error|Exception): .+)$", output, re.MULTILINE)
    last_line = (output.strip() or "it ended without output").splitlines()[-1]
    detail = errors[-1] if errors else f"{last_line} (exit code {status})"
    advice = "keras-strategy info shows the setup; the message names what failed"
    known = (fix for text, fix in _ADVICE.items() if text in output)
    return Finding(False, detail, next(known, advice))


def _run(
    arguments: list[str],
    timeout_seconds: float,
    is_isolated: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, int]:
    """Run Python, perhaps without this cluster; return its output and exit code."""
    environment = {**os.environ, **more}
    if is_isolated:
        environment.setdefault("NPROC", "8")
        for name in ("KERAS_STRATEGY_LOGICAL_CPUS", "TF_CONFIG"):
            environment.pop(name, None)
    try:
        return run_python(arguments, env=environment, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"no result within {timeout_seconds:g} s", -1


def train_on_two_replicas() -> None:
    """Print the largest difference from the weights that one device gives."""
    import keras
    import numpy as np

    import keras_strategy as ks

    ks.config.set_logical_devices("cpu", 2)
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    weights = []
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    for strategy in two, ks.OneDeviceStrategy("cpu:0"):
        # Not `keras.utils.set_random_seed`, which takes seconds to import TensorFlow.
        kernel = keras.initializers.GlorotUniform(seed=1)
        dense = keras.layers.Dense(2, kernel_initializer=kernel)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense])
            model.compile("sgd", "mse")
        model.fit(rows, rows[:, :2], batch_size=5, verbose=0)
        weights.append(model.get_weights()[0])
    print(_DIFFERENCE, float(np.abs(weights[0] - weights[1]).max()))


def sum_over_workers() -> None:
    import keras

    import keras_strategy as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    ones = strategy.run(lambda: keras.ops.ones(()))
    print(_SUM, float(strategy.reduce("sum", ones)))


if __name__ == "__main__":
    {"replicas": train_on_two_replicas, "workers": sum_over_workers}[sys.argv[1]]()
