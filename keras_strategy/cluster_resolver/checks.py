"""Checks of numbers and addresses that come from outside."""

from __future__ import annotations


def as_int(value: str, name: str, minimum: int = 0) -> int:
    """Return the integer that a text contains; `name` is for the error."""
    # Only ASCII digits, and few: int() accepts other alphabets' digits and has its own
    # error for very long texts.
    if not (value.isascii() and value.isdecimal() and len(value) < 10) or (
        int(value) < minimum
    ):
        raise ValueError(
            f"Expected {name} to be an integer >= {minimum}. Received: {value!r}"
        )
    return int(value)


def port_number(value: str | int, name: str) -> int:
    """Return a TCP port from 1 to 65535; `name` is for the error."""
    port = as_int(str(value), name, minimum=1)
    if port > 65535:
        raise ValueError(f"Expected {name} to be a port up to 65535. Received: {port}")
    return port


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with the brackets that an IPv6 address needs."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"
