"""The coordination with many clients: `python -m tests.cluster.scale`.

The coordinator is the chief's. The clients are connections of one event loop, which
join as workers do. Prints a row for the documentation.
"""

import argparse
import asyncio
import concurrent.futures
import json
import pathlib
import resource
import time

from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster.coordinator import Coordinator
from keras_strategy.cluster.rendezvous import connect, open_listeners
from keras_strategy.cluster.transport import encode, receive

SECRET = "of the test"
PAGE = resource.getpagesize()


async def _next(reader, kind):
    while True:
        message = await receive(reader)
        assert message is not None
        if message["type"] == kind:
            return message


async def _measure(port: int, count: int, size: int) -> dict[str, float]:
    names = [f"worker {rank}" for rank in range(count)]
    seconds = {}
    begun = time.perf_counter()

    def lap(what):
        nonlocal begun
        now = time.perf_counter()
        seconds[what], begun = now - begun, now

    clients = await asyncio.gather(
        *(
            connect(("127.0.0.1", port), {"rank": r, "names": names}, SECRET, 60.0)
            for r in range(count)
        )
    )

    async def joined(reader):
        while (await _next(reader, "arrived"))["missing"]:
            pass

    await asyncio.gather(*(joined(reader) for reader, _ in clients))
    lap("join")
    for what, values in (
        ("exchange", ["x" * size] * count),
        ("differ", [f"{rank:032}" for rank in range(count)]),
    ):
        for (_, writer), value in zip(clients, values, strict=True):
            asked = {"type": "exchange", "id": 0, "operation": what, "value": value}
            writer.write(encode(asked))
        replies = await asyncio.gather(
            *(_next(reader, "reply") for reader, _ in clients)
        )
        for reply in replies:
            which = reply.get("indices", [0] * count)
            assert [reply["values"][n] for n in which] == values
        lap(what)
    clients[-1][1].transport.abort()
    told = await asyncio.gather(
        *(_next(reader, "failed") for reader, _ in clients[:-1])
    )
    assert all(f"{names[-1]} disconnected" in message["message"] for message in told)
    lap("learn of a failure")
    for _, writer in clients:
        writer.transport.abort()
    return seconds


def many_clients(port: int, count: int, size: int = 1024) -> dict[str, float]:
    """Measure the seconds in which clients join, agree and learn of a failure.

    Args:
        port: Where they meet.
        count: How many they are.
        size: The bytes of the value that all say alike.
    """
    names = [f"worker {rank}" for rank in range(count)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * count + 100), hard))
    coordinator = Coordinator(open_listeners("127.0.0.1", port), names, SECRET)
    try:
        return asyncio.run(_measure(port, count, size))
    finally:
        coordinator.close()


def memory_growth(port: int, agreements: int) -> tuple[int, float]:
    """Measure the memory that many agreements add to two clients and a coordinator.

    Args:
        port: Where they meet.
        agreements: How many there are, after a tenth of them.

    Returns:
        The bytes, and the seconds of one agreement.
    """

    def one(rank):
        client = CoordinatorClient(
            ("127.0.0.1", port), rank, ["chief", "worker 0"], 60.0
        )
        for i in range(agreements // 10):
            client.exchange("step", [i, "x" * 100])
        before, begun = _resident(), time.perf_counter()
        for i in range(agreements):
            client.exchange("step", [i, "x" * 100])
        seconds = (time.perf_counter() - begun) / agreements
        client.exchange("measured")
        grown = _resident() - before
        client.exchange("end")
        return client, grown, seconds

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        (chief, grown, seconds), (other, *_) = pool.map(one, range(2))
    other.leave()
    chief.leave()
    return grown, seconds


def _resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--agreements", type=int, default=100_000)
    parser.add_argument("--port", type=int, default=23_456)
    options = parser.parse_args()
    seconds = many_clients(options.port, options.clients)
    print(json.dumps({what: round(s, 2) for what, s in seconds.items()}))
    grown, each = memory_growth(options.port + 1, options.agreements)
    print(f"{grown / 1e6:.2f} MB more, {1e3 * each:.2f} ms for each agreement")


if __name__ == "__main__":
    _main()
