import contextlib
import socket
import sys

import pytest

from keras_strategy.commands.local_cluster import PORT_IN_USE, free_ports
from tests.commands.scripts import finish, start


def test_ports_are_free_and_distinct():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with contextlib.ExitStack() as servers:
        for port in ports:
            servers.enter_context(socket.create_server(("127.0.0.1", port)))


def test_ports_are_below_ephemeral_range():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    if first <= 11_000:
        pytest.skip("this machine gives out nearly all of its ports")
    assert max(free_ports(50)) < first


def test_port_in_use_is_skipped():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match="Expected 1 free ports .* Found: 0"):
            free_ports(1, among=range(taken, taken + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
def test_two_programs_find_different_ports():
    """Though neither has opened them yet."""
    (port,) = free_ports(1)
    code = (
        "from keras_strategy.commands.local_cluster import free_ports\n"
        f"free_ports(1, among=range({port}, {port + 1}))"
    )
    other = finish(start(program=["-c", code]))
    assert f"between {port} and {port}. Found: 0" in other.stderr


def test_port_in_use_message_is_recognised():
    server = socket.create_server(("127.0.0.1", 0))
    with server, pytest.raises(OSError) as caught:
        socket.create_server(server.getsockname())
    assert PORT_IN_USE.search(f"some lines\n{caught.value}\n")
    assert not PORT_IN_USE.search("Connection refused")
