"""Links between simulated machines, and the switch that their frames pass.

`python links.py FILE SEED NAMESPACE...` is the switch. It makes a tap device `eth0` in
each network namespace, prints "ready" and passes frames on until its stdin is closed.
FILE has the state of each link. Any process that may write it can change a link, and
frames that are on their way are subject to that as well. The switch imports no package.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import mmap
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TUN = "/dev/net/tun"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MAX_FRAME = 2048
# Time that a frame waits at most for earlier ones of a link with a rate.
_QUEUE_SECONDS = 0.1


class Link(NamedTuple):
    """Delay, loss and rate of the frames from one machine to another."""

    delay_seconds: float = 0.0
    loss: float = 0.0
    # Unlimited if 0.
    bits_per_second: float = 0.0


_CUT = Link(loss=1.0)
_FORMAT = struct.Struct("3d")


class Links:
    """The links between `count` machines, whose state is in a file."""

    def __init__(self, path: str | os.PathLike[str], count: int):
        self.path, self.count = os.fspath(path), count
        with open(self.path, "wb") as file:
            file.write(bytes(_FORMAT.size * count**2))

    def set_all(
        self, *, delay_ms: float = 0.0, loss: float = 0.0, rate_mbit: float = 0.0
    ) -> None:
        """Give all links the same delay, lost fraction of frames, and rate."""
        link = Link(delay_ms / 1e3, loss, rate_mbit * 1e6)
        self._set(itertools.permutations(range(self.count), 2), link)

    def cut(self, machine: int) -> None:
        self.stop_sending(machine)
        self.stop_receiving(machine)

    def stop_sending(self, machine: int) -> None:
        """Lose all frames that a machine sends; it receives those of the others."""
        self._set(((machine, other) for other in range(self.count)), _CUT)

    def stop_receiving(self, machine: int) -> None:
        self._set(((other, machine) for other in range(self.count)), _CUT)

    def separate(self, one: int, other: int) -> None:
        """Cut two machines off from each other; the others reach both."""
        self._set([(one, other), (other, one)], _CUT)

    def restore(self) -> None:
        """Make all links pass every frame at once."""
        self.set_all()

    def _set(self, pairs: Iterable[tuple[int, int]], link: Link) -> None:
        with open(self.path, "r+b") as file:
            for source, target in pairs:
                file.seek(_FORMAT.size * (source * self.count + target))
                file.write(_FORMAT.pack(*link))


def enter_network(namespace: str) -> None:
    """Move this thread to a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")


def _open_tap() -> int:
    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(tap, _TUNSETIFF, request)
    return tap


def _read_frames(tap: int) -> Iterator[bytes]:
    try:
        while True:
            yield os.read(tap, _MAX_FRAME)
    except OSError:  # no more, or the device is down
        return


def _write_frame(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down
        os.write(tap, frame)


def run_switch(path: str, seed: str, namespaces: list[str]) -> None:
    # Frames arrive in time although workers use all cores.
    with contextlib.suppress(OSError):
        os.nice(-20)
    taps = []
    for namespace in namespaces:
        enter_network(namespace)
        taps.append(_open_tap())
    count = len(taps)
    with open(path, "r+b") as file:
        state = mmap.mmap(file.fileno(), 0)
    draws = [random.Random(f"{seed} {n}") for n in range(count**2)]
    # The taps of machines, by their hardware addresses.
    known: dict[bytes, int] = {}
    # Frames on their way: when they arrive, in which order, on which link.
    frames: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    free_at = [0.0] * count
    print("ready", flush=True)

    def send(source: int, target: int, frame: bytes, now: float) -> None:
        number = source * count + target
        link = Link(*_FORMAT.unpack_from(state, number * _FORMAT.size))
        if link.loss and draws[number].random() < link.loss:
            return
        start = now
        if link.bits_per_second:
            start = max(now, free_at[source])
            if start - now > _QUEUE_SECONDS:
                return
            start += len(frame) * 8 / link.bits_per_second
            free_at[source] = start
        heapq.heappush(frames, (start + link.delay_seconds, next(order), number, frame))

    while True:
        wait = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        ready, _, _ = select.select([0, *taps], [], [], wait)
        if 0 in ready:
            return
        now = time.monotonic()
        for source, tap in enumerate(taps):
            if tap not in ready:
                continue
            for frame in _read_frames(tap):
                known[frame[6:12]] = source
                target = known.get(frame[:6])
                others = [n for n in range(count) if n != source]
                for n in others if target is None else [target]:
                    send(source, n, frame, now)
        while frames and frames[0][0] <= time.monotonic():
            _, _, number, frame = heapq.heappop(frames)
            if _FORMAT.unpack_from(state, number * _FORMAT.size)[1] < 1:
                _write_frame(taps[number % count], frame)


if __name__ == "__main__":
    run_switch(sys.argv[1], sys.argv[2], sys.argv[3:])
