"""GPUs, memory and precision of the backend in use."""

import os
import sys
from typing import Any

BACKEND = os.environ.get("KERAS_BACKEND", "")


def about() -> dict[str, Any]:
    """Return the backend's version, its build and the GPUs that it sees."""
    import keras

    if BACKEND == "torch":
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        version, build = torch.__version__, torch.version.cuda
    elif BACKEND == "jax":
        import jax

        try:
            found = jax.devices("gpu")
        except RuntimeError:  # there is none
            found = []
        gpus = [device.device_kind for device in found]
        version = jax.__version__
        build = found[0].client.platform_version if found else None
    else:
        import tensorflow as tf

        version = tf.__version__
        build = tf.sysconfig.get_build_info().get("cuda_version")
        found = tf.config.list_physical_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
        gpus = [detail.get("device_name", "a GPU") for detail in details]
    return {
        "keras": keras.__version__,
        BACKEND: version,
        "build": f"CUDA: {build}" if build else "CPU",
        "gpus": gpus,
    }


def set_exact() -> None:
    """Multiply float32 in float32, and sum in one order where the backend can.

    With TF32, which has 10 bits, a difference could not be told from rounding.
    """
    if BACKEND == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    elif BACKEND == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)


def divide(megabytes: int = 8192) -> list[str]:
    """Split the first GPU, or CPU, into two logical devices, and return their names.

    Each of TensorFlow's logical GPUs has so many megabytes; torch's share the memory.
    """
    if BACKEND == "torch":
        return _divide_torch()
    import tensorflow as tf

    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    limit = {"memory_limit": megabytes} if kind == "GPU" else {}
    one = tf.config.LogicalDeviceConfiguration(**limit)
    device = tf.config.list_physical_devices(kind)[0]
    tf.config.set_logical_device_configuration(device, [one, one])
    return [f"{kind.lower()}:{index}" for index in range(2)]


def _divide_torch() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return ["cpu:0", "cpu:1"]
    from keras_strategy.backends.torch import group
    from keras_strategy.backends.torch.engine import TorchEngine

    # Two names of one GPU, which users cannot have.
    names = ["gpu:0", "gpu:1"]
    patched: Any = TorchEngine
    patched.list_devices = lambda *_: names
    for module in group, sys.modules[TorchEngine.__module__]:
        vars(module)["torch_device"] = lambda _: "cuda:0"
    return names


def weights(program: Any) -> list[Any]:
    """Return the weights of a program that is a `Fit`."""
    return program.model.get_weights()


def resting_megabytes(_: Any) -> float | None:
    """Return the memory of torch's tensors on the GPU now; None without a GPU."""
    import torch

    return torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else None


def peak_megabytes(_: Any) -> float | None:
    """Return the peak memory of the first GPU; None without a GPU."""
    if BACKEND == "torch":
        import torch

        if not torch.cuda.is_available():
            return None
        return torch.cuda.max_memory_allocated() / 1e6
    if BACKEND == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats()
        return None if stats is None else stats["peak_bytes_in_use"] / 1e6
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 1e6


def visible(index: int) -> dict[str, str]:
    """Return the environment of a process that sees one GPU, by its index."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names == "":
        return {}
    return {"CUDA_VISIBLE_DEVICES": names.split(",")[index] if names else str(index)}
