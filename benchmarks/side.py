"""One process of one side of a comparison, which trains when it is told to.

`side.py ADDRESS JOB` connects to `benchmarks.sides`, which gives the turns, and waits
in between: it reads from a socket, and uses no processor. A peer's process does not
import `keras_strategy`, and says so with each answer.
"""

import gc
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any


class Side:
    """A program, and what it takes.

    Args:
        job: The program, whether it is ours, its case, and the devices of the process.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._peer = not job["ours"]
        self._idle_since = time.process_time()

    def start(self) -> dict[str, Any]:
        """Create the program and train for one step."""
        began = time.perf_counter()
        if self._peer:
            _divide_cpu(self._job["devices"])
        cases = importlib.import_module(f"benchmarks.{self._job['cases']}").CASES
        (self._case,) = (c for c in cases if c.name == self._job["case"])
        self._program = program_named(self._job["program"])(self._case)
        self._program(1)
        taken = time.perf_counter() - began
        # What is there stays: to look through it after each turn would take longer.
        gc.collect()
        gc.freeze()
        return {"seconds": taken}

    def train(self, steps: int) -> dict[str, Any]:
        """Trains, and tells how long and how much of the processors it took."""
        wall, cpu = time.perf_counter(), time.process_time()
        idle = cpu - self._idle_since
        self._program(steps)
        taken = {
            "steps/s": time.perf_counter() - wall,
            "steps/CPU-s": time.process_time() - cpu,
            # While the other side had its turn.
            "idle": idle,
        }
        gc.collect()
        return taken

    def call(self, name: str) -> Any:
        """Return a function's result for the program.

        Args:
            name: Its module and name, such as "gpu.programs:memory".
        """
        return program_named(name)(self._program)

    def answer(self, request: tuple[str, ...]) -> dict[str, Any]:
        """Call a method by its name."""
        answer = getattr(self, request[0])(*request[1:])
        if self._peer and "keras_strategy" in sys.modules:
            raise RuntimeError("A peer must run without keras_strategy: it imported it")
        self._idle_since = time.process_time()
        told = {"cpu": self._idle_since, "peak_mb": _peak_megabytes()}
        return {"answer": answer, **told}


def program_named(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)


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


def main() -> None:
    address, job = sys.argv[1], json.loads(sys.argv[2])
    with Client(address) as driver:
        driver.send(job["rank"])
        side = Side(job)
        while (request := driver.recv()) != ("end",):
            try:
                driver.send(side.answer(request))
            except Exception:  # it is told where the benchmark was started
                driver.send({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Engines may take seconds to end their threads, which nobody waits for.
    os._exit(0)
