"""What a serialized TPU topology says of the hardware."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

# Field numbers of tensorflow/core/protobuf/tpu/topology.proto. Two numbers do
# not make TensorFlow worth loading under another backend.
_HARDWARE_FEATURE = 5
_EMBEDDING_FEATURE = 1
_NUM_EMBEDDING_DEVICES_PER_CHIP = 2


class EmbeddingFeature(enum.IntEnum):
    """The version of the hardware for embeddings."""

    UNSUPPORTED = 0
    V1 = 1
    V2 = 2


class TPUHardwareFeature(NamedTuple):
    """What the hardware has."""

    embedding_feature: int = 0
    num_embedding_devices_per_chip: int = 0


class TPUSystemMetadata(NamedTuple):
    """Facts of a TPU system.

    Attributes:
        num_cores: The number of cores of all hosts.
        num_hosts: The number of hosts.
        num_of_cores_per_host: The number of cores of each host.
        topology: Always `None`; the engines keep their own.
        devices: The names of this host's cores.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: tuple[str, ...]


def hardware_feature(serialized_topology: bytes) -> TPUHardwareFeature:
    """Reads the hardware's features from a serialized `TopologyProto`.

    Args:
        serialized_topology: The bytes.

    Returns:
        The features; zeros where nothing is said.

    Raises:
        ValueError: If the bytes are no such message.
    """
    found = TPUHardwareFeature()
    for number, value in _fields(serialized_topology):
        if number == _HARDWARE_FEATURE:
            if not isinstance(value, bytes):
                raise _malformed(serialized_topology)
            numbers = {n: v for n, v in _fields(value) if isinstance(v, int)}
            found = TPUHardwareFeature(
                numbers.get(_EMBEDDING_FEATURE, 0),
                numbers.get(_NUM_EMBEDDING_DEVICES_PER_CHIP, 0),
            )
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The numbers and values of a protobuf message's fields."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(message, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise _malformed(message)
        if position + length > len(message):
            raise _malformed(message)
        yield key >> 3, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _malformed(message)


def _malformed(message: bytes) -> ValueError:
    return ValueError(
        "Expected `serialized_tpu_topology` to be a serialized TopologyProto. "
        f"Received: {message[:40]!r}"
    )
