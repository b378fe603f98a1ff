"""Flags by which XLA compiles fast, which tests need more than fast programs."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "d"


def find_known_flags() -> str:
    """Return those that the installed jaxlib knows, which aborts at others."""
    if os.environ.get("KERAS_BACKEND") != "jax":
        return " ".join(FLAGS)
    known = CACHE / f"xla_flags_{version('jaxlib')}"
    if not known.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        known.write_text(" ".join(filter(_is_known, FLAGS)))
    return known.read_text()


def _is_known(flag: str) -> bool:
    variables = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    process = subprocess.run(command, env=variables, stderr=subprocess.DEVNULL)
    return process.returncode == 0
