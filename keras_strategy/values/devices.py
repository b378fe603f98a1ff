"""Device names, logical devices and the topology of replicas."""

import re
from collections.abc import Iterable, Sequence

# "gpu:0", "GPU:0", "/gpu:0", "/device:GPU:0", "cuda:0" and TensorFlow's full
# "/job:worker/replica:0/task:0/device:GPU:0" all name the same device.
_DEVICE_NAME = re.compile(
    r"^(?:/job:[^/]+/replica:\d+/task:\d+)?/?(?:device:)?(?P<kind>[a-z]+)"
    r"(?::(?P<index>\d+))?$"
)
_KINDS = {"cuda": "gpu", "rocm": "gpu"}


def canonical_device(name: str) -> str:
    """Return the canonical form of a device name, such as `"gpu:0"`.

    Args:
        name: A device name in any form that Keras or a backend uses. Without an
            index it means the first device of its kind.

    Raises:
        ValueError: If `name` is not a device name.
    """
    match = _DEVICE_NAME.match(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            "A device name must be a kind and index, such as 'gpu:0' or "
            f"'cpu:1'. Received: {name!r}"
        )
    kind = match["kind"]
    return f"{_KINDS.get(kind, kind)}:{int(match['index'] or 0)}"


def resolve_devices(
    devices: Iterable[str] | None, available: Sequence[str]
) -> tuple[str, ...]:
    """Return the canonical names of a strategy's devices, in the given order.

    Args:
        devices: The user's device names; None means every available device.
        available: The canonical names of the available devices.

    Raises:
        ValueError: If `devices` is empty, contains an unavailable device or a
            duplicate, or mixes kinds.
    """
    if devices is None:
        return tuple(available)
    if isinstance(devices, str):
        raise ValueError(
            "Argument `devices` must be a list of device names, such as "
            f"['{devices}']. Received: devices={devices!r}"
        )
    requested = list(devices)
    received = f"Received: devices={requested!r}. Available devices: {list(available)}"
    if not requested:
        raise ValueError(
            "Argument `devices` must name at least one device, or be None for "
            f"all local devices. {received}"
        )
    names = [canonical_device(name) for name in requested]
    unknown = [name for name in names if name not in available]
    if unknown:
        raise ValueError(
            f"Argument `devices` names devices that are not available: {unknown}. "
            f"{received}"
        )
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Argument `devices` names devices more than once: {duplicates}. {received}"
        )
    kinds = sorted({name.split(":")[0] for name in names})
    if len(kinds) > 1:
        raise ValueError(
            "Argument `devices` must name devices of one kind, since all "
            f"replicas run the same program. Found kinds {kinds}. {received}"
        )
    return tuple(names)
