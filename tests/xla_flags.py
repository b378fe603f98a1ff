"""Flags by which XLA compiles fast, which tests need more than fast programs."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
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
    try:
        known = CACHE / f"xla_flags_{version('jaxlib')}"
    except PackageNotFoundError:
        return " ".join(FLAGS)
    if not known.exists():
        flags = FLAGS if _are_known(*FLAGS) else filter(_are_known, FLAGS)
        text = " ".join(flags)
        CACHE.mkdir(parents=True, exist_ok=True)
        # Other processes look for it at the same time.
        part = known.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(known)
    return known.read_text()


def _are_known(*flags: str) -> bool:
    # Names of removed flags are still in the library: only JAX can tell.
    variables = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    process = subprocess.run(command, env=variables, stderr=subprocess.DEVNULL)
    return process.returncode == 0
