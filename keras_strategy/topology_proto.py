"""Codec of TensorFlow's `TopologyProto`.

The message holds only integers, so this needs neither protobuf nor NumPy.
"""

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Field numbers of TopologyProto.
MESH_SHAPE, TASKS, PER_TASK, COORDINATES, HARDWARE = 1, 2, 3, 4, 5
# Field numbers of the nested message TPUHardwareFeature.
_EMBEDDING, _PER_CHIP = 1, 2
# Protobuf wire types: one varint, or length-delimited (packed varints).
NUMBER, PACKED = 0, 2


class EmbeddingFeature(enum.IntEnum):
    """The embedding hardware of a TPU."""

    UNSUPPORTED = 0
    V1 = 1
    V2 = 2


class TPUHardwareFeature(NamedTuple):
    """The hardware of a TPU other than its cores.

    Attributes:
        embedding_feature: An `EmbeddingFeature`.
        num_embedding_devices_per_chip: The number of embedding devices of a chip.
    """

    embedding_feature: EmbeddingFeature
    num_embedding_devices_per_chip: int


def parse_hardware_feature(serialized: bytes) -> TPUHardwareFeature:
    """Parse the hardware feature of a serialized topology; missing fields are 0.

    Raises:
        ValueError: If the bytes are not a TopologyProto.
    """
    numbers = {_EMBEDDING: 0, _PER_CHIP: 0}
    for field, value in decode_fields(serialized):
        if field == HARDWARE and isinstance(value, bytes):
            pairs = ((f, v) for f, v in decode_fields(value) if isinstance(v, int))
            numbers |= {f: v for f, v in pairs if f in numbers}
    return TPUHardwareFeature(EmbeddingFeature(numbers[_EMBEDDING]), numbers[_PER_CHIP])


def decode_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field."""
    pos = 0
    while pos < len(message):
        key, pos = _decode_varint(message, pos)
        field, wire_type = key >> 3, key & 7
        if wire_type not in (NUMBER, PACKED):
            raise _invalid_topology_error()
        value, pos = _decode_varint(message, pos)
        if wire_type == NUMBER:
            yield field, _to_signed(value)
            continue
        if pos + value > len(message):
            raise _invalid_topology_error()
        yield field, message[pos : pos + value]
        pos += value


def decode_varints(packed: bytes) -> Iterator[int]:
    """Yield the integers of a packed field."""
    pos = 0
    while pos < len(packed):
        number, pos = _decode_varint(packed, pos)
        yield _to_signed(number)


def _decode_varint(message: bytes, pos: int) -> tuple[int, int]:
    number = 0
    for i in range(10):
        if pos >= len(message):
            break
        byte = message[pos]
        number |= (byte & 0x7F) << 7 * i
        pos += 1
        if byte < 0x80:
            return number, pos
    raise _invalid_topology_error()


def _invalid_topology_error() -> ValueError:
    return ValueError(
        "Argument `serialized` must be the result of `Topology.serialized()`. Received "
        "bytes that are not a TopologyProto."
    )


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def encode_varint(number: int) -> bytes:
    """Encode an integer as a varint."""
    number %= 1 << 64
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def encode_packed(field: int, numbers: Iterable[int]) -> bytes:
    """Encode integers as a packed field."""
    content = b"".join(encode_varint(int(number)) for number in numbers)
    if not content:
        return b""
    return encode_varint(field << 3 | PACKED) + encode_varint(len(content)) + content
