"""One process of a program, which trains when it is its turn.

`benchmarks.paired_processes` gives the turns. In between it reads from a socket, and
uses no processor. A peer's process does not import `keras_strategy`, and checks that
with each answer.
"""

import gc
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

from benchmarks.paired_timing import turn_of


class ProgramProcess:
    """A program and its costs, in this process."""

    def __init__(
        self, function: str, options: Any, is_ours: bool, case: str, devices: int
    ) -> None:
        self._program_arguments = function, options, case
        self._is_ours, self._devices = is_ours, devices
        self._idle_since = time.process_time()

    def start(self) -> float:
        """Create the program, train for one step, and return the seconds."""
        began = time.perf_counter()
        if not self._is_ours:
            _divide_cpu(self._devices)
        self._program = create_program(*self._program_arguments)
        self._program(1)
        seconds = time.perf_counter() - began
        # What is there stays: to look through it after each turn would take longer.
        gc.collect()
        gc.freeze()
        return seconds

    def train(self, steps: int) -> dict[str, float]:
        """Train, and return the seconds, and those of the CPU since the last turn."""
        idle = time.process_time() - self._idle_since
        seconds = turn_of(self._program)(steps)
        gc.collect()
        return {**seconds, "idle": idle}

    def call(self, name: str) -> Any:
        """Return a function's result for the program, such as "gpu.engine:weights"."""
        return find_function(name)(self._program)

    def answer(self, request: tuple[Any, ...]) -> dict[str, Any]:
        """Call a method by its name."""
        answer = getattr(self, request[0])(*request[1:])
        if not self._is_ours and "keras_strategy" in sys.modules:
            raise RuntimeError("A peer must run without keras_strategy: it imported it")
        self._idle_since = time.process_time()
        usage = {"cpu": self._idle_since, "peak_mb": _peak_megabytes()}
        return {"answer": answer, **usage}


def find_function(name: str) -> Callable[..., Any]:
    """Return a function of a module of `benchmarks`, by "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)


def create_program(function: str, options: Any, case: str) -> Callable[[int], None]:
    cases = importlib.import_module("benchmarks.cases").CASES
    return find_function(f"programs.{function}")(cases[case], **options)


def _divide_cpu(devices: int) -> None:
    """Create a strategy's CPU devices, before the backend uses any."""
    backend = os.environ["KERAS_BACKEND"]
    if backend == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", devices)
    elif backend == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
        tf.config.set_logical_device_configuration(cpu, logical)


def _peak_megabytes() -> float:
    """Return the peak resident memory; 0 if the system does not report it."""
    try:
        with open("/proc/self/status") as file:
            found = re.search(r"VmHWM:\s*(\d+) kB", file.read())
    except FileNotFoundError:
        found = None
    return int(found[1]) / 1024 if found else 0.0


def serve(address: str, *program: Any) -> None:
    """Answer requests until this process is killed."""
    process = ProgramProcess(*program)
    with Client(address) as driver:
        while True:
            request = driver.recv()
            try:
                driver.send(process.answer(request))
            except Exception:  # raised where the benchmark was started
                driver.send({"error": traceback.format_exc()})
