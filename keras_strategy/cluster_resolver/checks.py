"""Numbers and addresses that come from outside, checked."""

from __future__ import annotations


def as_int(value: str, name: str, minimum: int = 0) -> int:
    """The integer that a text from outside is; `name` says whose text."""
    if not (value.isascii() and value.isdecimal() and len(value) < 10) or (
        int(value) < minimum
    ):
        raise ValueError(
            f"Expected {name} to be an integer >= {minimum}. Received: {value!r}"
        )
    return int(value)


def port_number(value: str | int, name: str) -> int:
    """A TCP port that others can connect to."""
    port = as_int(str(value), name, minimum=1)
    if port > 65535:
        raise ValueError(f"Expected {name} to be a port up to 65535. Received: {port}")
    return port


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"
