"""Device names, and which replica lives on which device."""

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
    """Returns the short form, such as `"gpu:0"`, of a device's name.

    Args:
        name: A device's name in any of the forms that Keras and its backends
            use. Without an index it means the first device of its kind.

    Returns:
        The kind in lower case, a colon, and the index.

    Raises:
        ValueError: If `name` is not the name of a device.
    """
    match = _DEVICE_NAME.match(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            "A device is named by its kind and index, such as 'gpu:0' or "
            f"'cpu:1'. Received: {name!r}"
        )
    kind = match["kind"]
    return f"{_KINDS.get(kind, kind)}:{int(match['index'] or 0)}"


def resolve_devices(
    devices: Iterable[str] | None, available: Sequence[str]
) -> tuple[str, ...]:
    """Returns the canonical names of the devices that a strategy shall use.

    Args:
        devices: What the user asked for; None means every available device.
        available: The canonical names of the devices that there are.

    Returns:
        The devices, in the order given, one replica each.

    Raises:
        ValueError: If `devices` is empty, holds a device that is not there,
            holds one twice, or mixes kinds.
    """
    if devices is None:
        return tuple(available)
    if isinstance(devices, str):
        raise ValueError(
            "Argument `devices` must be a list of device names, such as "
            f"['{devices}']. Received: devices={devices!r}"
        )
    requested = list(devices)
    there_is = f"Available devices: {list(available)}"
    received = f"Received: devices={requested!r}. {there_is}"
    if not requested:
        raise ValueError(
            "Argument `devices` must name at least one device, or be None for "
            f"all local devices. {received}"
        )
    names = [canonical_device(name) for name in requested]
    unknown = [name for name in names if name not in available]
    if unknown:
        raise ValueError(
            f"Argument `devices` names devices that are not there: {unknown}. "
            f"{received}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Argument `devices` names devices more than once: {twice}. {received}"
        )
    kinds = sorted({name.split(":")[0] for name in names})
    if len(kinds) > 1:
        raise ValueError(
            "Argument `devices` must name devices of one kind, since all "
            f"replicas run the same program. Found kinds {kinds}. {received}"
        )
    return tuple(names)
