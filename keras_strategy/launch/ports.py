"""Free ports of this machine."""

import atexit
import collections
import contextlib
import pathlib
import random
import re
import socket
import sys

_LOWEST = 10_000
_EPHEMERAL = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
# As the C library, Python, torch's store and gRPC say it.
_TAKEN = re.compile(r"address already in use|EADDRINUSE|ADDRESS_IN_USE", re.IGNORECASE)
# Not the generator that a program seeds: two programs with one seed would meet.
_random = random.SystemRandom()
# Who looks for ports does not open them; the workers that it starts do, after they have
# imported an engine. Meanwhile other programs would find the same ones, so each that
# was found has a name of this machine's, which one process can have. Those of the last
# ports are kept, for as long as this process lives.
_NAME = "\0keras_strategy port {}"
_names: collections.deque[socket.socket] = collections.deque()
_NAMES = 200


def free_ports(count: int, among: range | None = None) -> list[int]:
    """Finds ports that nobody uses now.

    They lie below the range from which the system gives ports to connections, so only
    a server can take one before it is used. On Linux other programs that look for ports
    here do not find them either, while this process lives and has not found many more.

    Args:
        count: How many.
        among: Where to look instead.

    Returns:
        Different ports, in no order.

    Raises:
        OSError: If there are not as many.

    Example:

    ```python
    from keras_strategy.launch.ports import free_ports

    assert len(set(free_ports(3))) == 3
    ```
    """
    candidates = among or range(_LOWEST, _first_ephemeral())
    ports: list[int] = []
    # All are held until the last is found, so that none comes twice.
    with contextlib.ExitStack() as held:
        for port in _random.sample(candidates, len(candidates)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                # Every interface: a server that listens on one of them is in the way.
                probe.bind(("", port))
                _take_name(port)
                ports.append(port)
    if len(ports) < count:
        raise OSError(
            f"Expected {count} free ports between {candidates.start} and "
            f"{candidates.stop - 1}. Found: {len(ports)}"
        )
    return ports


def reports_port_in_use(output: str) -> bool:
    """Tells whether a program's output complains about a port that is in use."""
    return _TAKEN.search(output) is not None


def _take_name(port: int) -> None:
    """Keeps others that look for ports from finding it; OSError if one has."""
    if sys.platform != "linux":
        return  # there are no names without files
    try:
        name = socket.socket(socket.AF_UNIX)
    except OSError:
        return  # where none may be made, all do without
    try:
        name.bind(_NAME.format(port))
    except OSError:
        name.close()
        raise
    _names.append(name)
    if len(_names) > _NAMES:
        _names.popleft().close()


@atexit.register
def _give_names_back() -> None:
    while _names:
        _names.pop().close()


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # A machine may give out nearly all of its ports; then any must do.
    return first if first > _LOWEST + 1_000 else 60_000
