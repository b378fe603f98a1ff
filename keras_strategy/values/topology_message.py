"""TensorFlow's message TopologyProto, of numbers alone: no need of protocol buffers."""

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The fields of TensorFlow's message TopologyProto.
MESH_SHAPE, TASKS, PER_TASK, COORDINATES, HARDWARE = 1, 2, 3, 4, 5
# Those of the message within it, TPUHardwareFeature.
_EMBEDDING, _PER_CHIP = 1, 2
# How protocol buffers write a number, and numbers in a row.
NUMBER, PACKED = 0, 2


class EmbeddingFeature(enum.IntEnum):
    """What a TPU has for embeddings."""

    UNSUPPORTED = 0
    V1 = 1
    V2 = 2


class TPUHardwareFeature(NamedTuple):
    """What a TPU has besides its cores.

    Attributes:
        embedding_feature: An `EmbeddingFeature`.
        num_embedding_devices_per_chip: How many devices for embeddings a chip has.
    """

    embedding_feature: EmbeddingFeature
    num_embedding_devices_per_chip: int


def hardware_feature(serialized: bytes) -> TPUHardwareFeature:
    """What a topology tells of a TPU besides its cores; nothing told is 0.

    Args:
        serialized: What `Topology.serialized()` returns, here or in TensorFlow.

    Raises:
        ValueError: If these bytes are no topology.
    """
    numbers = {_EMBEDDING: 0, _PER_CHIP: 0}
    for field, value in fields(serialized):
        if field == HARDWARE and isinstance(value, bytes):
            told = ((f, v) for f, v in fields(value) if isinstance(v, int))
            numbers |= {f: signed(v) for f, v in told if f in numbers}
    return TPUHardwareFeature(EmbeddingFeature(numbers[_EMBEDDING]), numbers[_PER_CHIP])


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field's number, and what it holds."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        field, kind = key >> 3, key & 7
        if kind not in (NUMBER, PACKED):
            raise _no_topology()
        value, at = _read_varint(message, at)
        if kind == NUMBER:
            yield field, value
            continue
        if at + value > len(message):
            raise _no_topology()
        yield field, message[at : at + value]
        at += value


def varints(packed: bytes) -> Iterator[int]:
    """The numbers in a row."""
    at = 0
    while at < len(packed):
        number, at = _read_varint(packed, at)
        yield signed(number)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for place in range(10):
        if at >= len(message):
            break
        byte = message[at]
        number |= (byte & 0x7F) << 7 * place
        at += 1
        if byte < 0x80:
            return number, at
    raise _no_topology()


def _no_topology() -> ValueError:
    return ValueError(
        "Argument `serialized` must be what `Topology.serialized()` returns. Received "
        "bytes that are no TopologyProto."
    )


def signed(number: int) -> int:
    """The number that is meant, which may be negative."""
    return number - (1 << 64) if number >= 1 << 63 else number


def varint(number: int) -> bytes:
    """How a number is written."""
    number %= 1 << 64
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def packed(field: int, numbers: Iterable[int]) -> bytes:
    """How a field with numbers in a row is written."""
    content = b"".join(varint(int(number)) for number in numbers)
    if not content:
        return b""
    return varint(field << 3 | PACKED) + varint(len(content)) + content
