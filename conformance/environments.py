"""Folders of packages that a system needs beside the running interpreter's.

Each is made by `pip install --no-deps --target`, and comes first on the path of the
system's processes. Everything else, such as torch, is the interpreter's.
"""

import os

from tools.package_folders import BUILD, ROOT, install

REQUIREMENTS = {
    "nightly": ["--pre", "keras-nightly"],
    "accelerate": ["accelerate", "huggingface_hub<1", "safetensors", "tqdm"],
    "fabric": ["lightning-fabric", "lightning-utilities"],
}


def variables(backend: str, environment: str) -> dict[str, str]:
    """Return the environment variables of a system's processes."""
    folders = []
    if environment:
        packages = install(f"conformance-{environment}", REQUIREMENTS[environment])
        folders.append(str(packages))
    return {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join([*folders, str(ROOT)]),
        # XLA's CPU devices can starve each other on a machine of few cores.
        "NPROC": os.environ.get("NPROC", "8"),
        # Idle threads of torch spin, which takes the cores of the other processes.
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        # Compiling takes nearly all of the time of a small program on JAX.
        "XLA_FLAGS": "--xla_backend_optimization_level=0"
        " --xla_llvm_disable_expensive_passes=true",
        "JAX_COMPILATION_CACHE_DIR": str(BUILD / "conformance-jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
