"""Members that meet, agree and look up; each is a thread of this process."""

import concurrent.futures
import contextlib
import ipaddress
import json
import os
import socket
import threading
import time

import pytest

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.network import local_addresses
from keras_strategy.cluster.rendezvous import (
    default_timeout_seconds,
    open_listeners,
    rendezvous_address,
)
from keras_strategy.cluster.transport import MAX_LINE, PROTOCOL, encode
from keras_strategy.errors import ClusterError, WorkerFailedError
from keras_strategy.options import CommunicationOptions
from tests.cluster.conftest import SOON, names_of


def join(port: int, rank: int, count: int, timeout: float = SOON, **arguments):
    address = ("127.0.0.1", port)
    return CoordinatorClient(address, rank, names_of(count), timeout, **arguments)


def outcome(function, *arguments, **named):
    """Return the result of a function, or its exception."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        return error


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_exchange_gathers_by_rank(together):
    values = [{"rows": 3, "name": "é\n"}, [1.5, None], "x" * 10_000]

    def work(client, rank):
        return [client.exchange(f"step {i}", [i, values[rank]]) for i in range(20)]

    expected = [[[i, value] for value in values] for i in range(20)]
    assert together(3, work) == [expected] * 3


def test_early_exchange_is_received(together):
    """It is answered when it is asked for, in between or not at all."""

    def work(client, rank):
        first = client.start_exchange("batch", [rank, 0])
        seen = [client.exchange("step", rank)]
        client.start_exchange("batch", "nobody asks for the answer")
        last = client.start_exchange("batch", [rank, 1])
        return [*seen, client.exchange("step", -rank), last(), first()]

    expected = [[0, 1], [0, -1], [[0, 1], [1, 1]], [[0, 0], [1, 0]]]
    assert together(2, work) == [expected] * 2


def test_client_may_leave_after_sending(together):
    """And who waits for what was not told hears of it."""
    # A failure is raised by whatever a client does next, so that both must have read
    # the messages before one of them fails.
    both_have_read, has_left = threading.Barrier(2), threading.Event()

    def work(client, rank):
        told = client.start_exchange("batch", rank)
        if rank == 2:
            client.leave()
            has_left.set()
            return None
        assert has_left.wait(SOON)
        seen = told()
        both_have_read.wait(SOON)
        with pytest.raises(WorkerFailedError, match="ended while .* was waiting"):
            client.exchange("batch")
        return seen

    assert together(3, work)[:2] == [[0, 1, 2]] * 2


def test_single_worker_needs_no_connection(together):
    def work(client, rank):
        with client.track_operation("fit step"):
            return client.exchange("shapes", 1)

    assert together(1, work) == [[1]]


def test_different_operations_are_reported(together):
    def work(client, rank):
        return client.exchange("gather" if rank == 1 else "fit step")

    for error in together(2, work):
        assert isinstance(error, WorkerFailedError)
        assert "(chief: `fit step`, worker 0: `gather`)" in str(error)


def test_different_order_is_reported(together):
    """With a timeout that is over before anybody suspects that they never meet."""

    def work(client, rank):
        if rank == 1:
            client.track_operation("all_reduce").__enter__()
            time.sleep(0.1)
            client.exchange("gather")
        else:
            client.exchange("fit step")

    for error in together(2, work, timeout=2.0):
        assert isinstance(error, WorkerFailedError)
        assert "chief" in str(error) and "`fit step`" in str(error)


@pytest.fixture
def suspicious(monkeypatch):
    monkeypatch.setattr(watchdog, "DEADLOCK_SECONDS", 0.4)


def test_deadlock_is_reported(together, suspicious):
    def work(client, rank):
        client.notes["callbacks"] = "Saves" if rank == 0 else ""
        client.exchange("start")
        with client.track_operation("a step"):
            pass
        if rank == 0:
            with client.track_operation("a save"):
                client.failed.wait(SOON)
        else:
            client.exchange("the next batch")

    for error in together(3, work, timeout=60):
        assert isinstance(error, WorkerFailedError)
        assert (
            "They are in different operations (chief: `a save`, worker 0: `the next "
            "batch`, worker 1: `the next batch`). Their callbacks differ (chief: "
            "Saves; worker 0: none; worker 1: none)."
        ) in str(error)
        assert "Main thread of worker 1" in str(error)


@pytest.mark.parametrize("rows", [1, 100], ids=["few", "many"])
def test_slow_worker_is_no_failure(together, suspicious, rows):
    """One compiles a step that the others have done, and asks nobody meanwhile."""

    def work(client, rank):
        client.exchange("start")
        for i in range(rows):
            with client.track_operation(f"step {i} 'dense_{rank}'"):
                time.sleep(2.5 if rank == 1 and i == rows - 1 else 0)
        return client.exchange("the next batch", rank)

    assert together(3, work, timeout=60) == [[0, 1, 2]] * 3


def test_hanging_collective_is_reported(together):
    def work(client, rank):
        with client.track_operation("all_reduce in step 2"):
            client.failed.wait(SOON)

    for error in together(2, work, timeout=2.0):
        assert isinstance(error, WorkerFailedError)
        assert (
            "all workers reached `all_reduce in step 2`, and it did not end within 2 s"
        ) in str(error)
        assert "Main thread of worker 0" in str(error)


def test_concurrent_requests_are_answered(together, monkeypatch):
    """The second one too, when the first has got on meanwhile."""
    # Nobody asks again by itself.
    monkeypatch.setattr(watchdog, "DEADLOCK_SECONDS", 600.0)

    def work(client, rank):
        client.exchange("start")
        ready.wait(SOON)
        if rank == 2:
            client.failed.wait(SOON)
            return client.failure
        with client.track_operation("step"):
            inside.wait(SOON)
            if rank == 0:
                client._coordinator._thread.run(
                    ask(client._coordinator, client.trace.operation)
                )
            client.failed.wait(SOON)

    async def ask(coordinator, operation):
        for rank, count in ((0, operation.count - 1), (1, operation.count)):
            coordinator._handle(
                rank, {"type": "inquire", "count": count, "timeout": 0.0}
            )

    ready, inside = threading.Barrier(3), threading.Barrier(2)
    *waited, blamed = together(3, work, timeout=60)
    assert "worker 1 did not reach `step` within 0 s" in blamed
    for error in waited:
        assert isinstance(error, WorkerFailedError) and str(error).startswith(
            "worker 1 did not reach `step`"
        )


def test_long_descriptions_are_sent_on_difference(together, monkeypatch):
    """Otherwise a digest does, and once for all who say the same."""
    replies = []
    handle = CoordinatorClient._handle

    def heard(self, message):
        if message["type"] == "reply":
            replies.append((len(message["values"]), len(json.dumps(message))))
        handle(self, message)

    monkeypatch.setattr(CoordinatorClient, "_handle", heard)
    same = [["weights", "x" * 100] for _ in range(1000)]

    def work(client, rank):
        cluster = Cluster(rank, names_of(3), (), client, CommunicationOptions())
        other = [*same[:700], ["weights", rank // 2], *same[701:]]
        found = [cluster.values_if_different("step", value) for value in (same, other)]
        _, none = cluster.first_difference("fit", same)
        _, one = cluster.first_difference("fit", other)
        return found, none, one

    for found, none, one in together(3, work):
        assert found[0] is none is None
        assert [value[700][1] for value in found[1]] == [0, 0, 1]
        assert one == (700, [["weights", 0], ["weights", 0], ["weights", 1]])
    whole = [size for _, size in replies if size > 10_000]
    # What differs came to each of them, of the two that say the same once.
    assert len(whole) == 3 and max(whole) < 2.5 * len(json.dumps(same))
    assert {count for count, size in replies if size > 10_000} == {2}


def test_progressing_slow_operation_is_no_failure(together):
    def work(client, rank):
        for step in range(4):
            with client.track_operation(f"step {step}"):
                time.sleep(1.0)
        return client.exchange("end", rank)

    assert together(2, work, timeout=3.0) == [[0, 1]] * 2


def test_unsendable_values_are_refused(together):
    def work(client, rank):
        with pytest.raises(TypeError, match="`value` in 'step' to be a value of JSON"):
            client.exchange("step", object())
        with pytest.raises(ValueError, match=f"at most {MAX_LINE} bytes"):
            client.exchange("step", "x" * MAX_LINE)
        # Neither does harm.
        return client.exchange("step", rank)

    assert together(2, work) == [[0, 1]] * 2


def test_large_values_are_sent(together):
    def work(client, rank):
        return [len(v) for v in client.exchange("step", "x" * (MAX_LINE - 100))]

    assert together(3, work) == [[MAX_LINE - 100] * 3] * 3


def test_late_worker_is_awaited(together):
    """The time of an operation that all have reached starts with the last one."""

    def work(client, rank):
        time.sleep(3.5 * rank)
        with client.track_operation("save"):
            time.sleep(6.5 - 3.5 * rank)
        return client.exchange("end", rank)

    assert together(2, work, timeout=5.0) == [[0, 1]] * 2


def test_leave_frees_threads_and_sockets(port):
    # Strategies of earlier tests have threads until they are collected.
    before = set(threading.enumerate())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda rank: join(port, rank, 2), range(2)))
    for client in clients:
        client.leave()
        client.leave()
        with pytest.raises(RuntimeError, match="has left its cluster"):
            client.exchange("step")
    assert not listening(port)
    started = set(threading.enumerate()) - before
    assert not [t for t in started if "keras_strategy" in t.name]
    # The next strategy of the same program can use the same port at once.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = list(pool.map(lambda rank: join(port, rank, 2), range(2)))
        assert list(pool.map(lambda m: m.exchange("x", 1), clients)) == [[1, 1]] * 2
    for client in clients:
        client.leave()


def test_exchange_with_departed_worker_is_reported(together):
    def work(client, rank):
        if rank == 1:
            return client.leave()
        return client.exchange("fit step")

    chief, _, last = together(3, work)
    for error in (chief, last):
        assert isinstance(error, WorkerFailedError)
        assert "worker 0 ended while" in str(error) and "`fit step`" in str(error)


def test_exchange_with_departed_chief_is_reported(together):
    def work(client, rank):
        if rank == 0:
            return client.leave()
        return outcome(client.exchange, "fit step"), outcome(
            client.exchange, "fit step"
        )

    _, (first, second) = together(2, work)
    for error in (first, second):
        assert isinstance(error, WorkerFailedError)
        assert "chief" in str(error) and "`fit step`" in str(error)


def test_leaving_worker_is_not_awaited(together):
    """An engine's goodbye may wait for the others, who may wait for this worker."""
    others_know = threading.Event()

    def work(client, rank):
        client.exchange("start")
        if rank == 0:
            client.on_leave(lambda: others_know.wait(SOON))
            return client.leave()
        said = outcome(client.exchange, "fit step")
        others_know.set()
        return said

    _, error = together(2, work)
    assert isinstance(error, WorkerFailedError)
    assert "chief ended while worker 0 was waiting for it in `fit step`" in str(error)


# Who does not come, and who does not belong.


def test_missing_worker_is_reported(port):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda r: outcome(join, port, r, 4, 4.0), (0, 2)))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "worker 0 and worker 2 have not arrived within 4 s" in str(error)
    assert not listening(port)


def test_missing_chief_is_reported(port):
    with pytest.raises(ClusterError) as caught:
        join(port, 1, 2, timeout=0.5)
    assert "chief has not arrived within 0.5 s" in str(caught.value)
    assert f"127.0.0.1:{port}" in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "count", "run", "reason"),
    [
        (1, 3, "a", "another process has already joined as worker 0"),
        (1, 2, "a", "it counts 2 workers in the cluster, and the chief counts 3"),
        (1, 3, "b", "the chief there belongs to another run"),
    ],
    ids=["rank", "count", "run"],
)
def test_foreign_client_is_refused_alone(port, rank, count, run, reason):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        joining = [pool.submit(join, port, r, 3, secret="a") for r in (0, 1)]
        # As from another machine, which calls the chief's by another name.
        other = ("localhost", port), rank, names_of(count), SOON
        joining.append(pool.submit(CoordinatorClient, *other, secret=run))
        # Of two that claim the same rank, either may be the first.
        done, others = concurrent.futures.wait(
            joining, return_when=concurrent.futures.FIRST_COMPLETED
        )
        (refused,) = [future.exception() for future in done]
        assert isinstance(refused, ClusterError)
        assert "worker 0 cannot join at " in str(refused)
        assert reason in str(refused)
        clients = [join(port, 2, 3, secret="a"), *(f.result() for f in others)]
        agreed = list(pool.map(lambda m: m.exchange("x", m.rank), clients))
        assert agreed == [[0, 1, 2]] * 3
    for client in sorted(clients, key=lambda client: -client.rank):
        client.leave()


def test_surplus_client_is_refused_at_once(together, port):
    """The chief does not listen any more."""

    def work(client, rank):
        client.exchange("all are there")
        late = outcome(join, port, 1, 2) if rank == 0 else None
        client.exchange("one was late")
        return late

    begun = time.monotonic()
    late, _ = together(2, work)
    assert time.monotonic() - begun < SOON / 2
    assert isinstance(late, ClusterError)
    assert "this machine has already joined as worker 0" in str(late)


@pytest.fixture
def waiting_chief(port):
    """The chief of two workers, while the other has not arrived."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        chief = pool.submit(join, port, 0, 2, secret="ours")
        while not listening(port):
            time.sleep(0.01)
        yield chief
        other = join(port, 1, 2, secret="ours")
        pool.submit(other.exchange, "step", 1)
        assert chief.result().exchange("step", 0) == [0, 1]
    other.leave()
    chief.result().leave()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /passwords HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\n",
        b"x" * (MAX_LINE * 3),
        b"[" * 100_000 + b"\n",
        json.dumps({"type": "bye"}).encode() + b"\n",
        encode({"type": "hello", "protocol": PROTOCOL, "nonce": {}})
        + b'{"type":"join","rank":[],"names":{},"proof":"\\ud800"}\n',
        encode({"type": "hello", "protocol": PROTOCOL}) + b'{"type":"join"}\n',
    ],
    ids=["http", "binary", "endless", "deep", "no_hello", "garbled", "no_proof"],
)
def test_untrusted_clients_do_no_harm(waiting_chief, port, sent, capfd):
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        try:
            stranger.sendall(sent)
            answered = b""
            while got := stranger.recv(1000):
                answered += got
        except ConnectionError:
            answered = b""  # Closed before all was sent.
    told = [json.loads(line)["type"] for line in answered.splitlines()]
    assert told in ([], ["challenge"], ["challenge", "untrusted"])
    assert capfd.readouterr() == ("", "")


def test_silent_untrusted_clients_do_no_harm(waiting_chief, port):
    """They do not exhaust the files of the chief's process."""
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=SOON)
            strangers.enter_context(stranger)
        until = time.monotonic() + SOON
        # Both ends are of this process: the chief has let go of most.
        while len(os.listdir("/proc/self/fd")) - before > 300 + 80:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_socket_closes_when_all_have_joined(together, port):
    def work(client, rank):
        client.exchange("start")
        return listening(port)

    assert together(2, work) == [False, False]


def test_secret_is_never_sent(port):
    """A recorded proof does not authenticate another connection."""
    heard = []

    def pass_on(source, target):
        while got := source.recv(10_000):
            heard.append(got)
            target.sendall(got)
        target.shutdown(socket.SHUT_WR)

    with (
        socket.create_server(("127.0.0.1", 0)) as relay,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        chief = pool.submit(join, port, 0, 2, secret="our secret")
        while not listening(port):
            time.sleep(0.01)
        at = relay.getsockname()[1]
        worker = pool.submit(join, at, 1, 2, secret="our secret")
        ends = relay.accept()[0], socket.create_connection(("127.0.0.1", port))
        with ends[0], ends[1]:
            passing = [pool.submit(pass_on, *ends), pool.submit(pass_on, *ends[::-1])]
            worker.result().leave()
            chief.result().leave()
            concurrent.futures.wait(passing)
    assert b"challenge" in b"".join(heard) and b"welcome" in b"".join(heard)
    assert b"our secret" not in b"".join(heard)


@pytest.mark.parametrize(
    ("sender", "sent"),
    [
        ("worker 0", {"type": "failed"}),
        ("worker 0", {"type": "exchange", "operation": "step"}),
        ("worker 0", {"type": "nonsense"}),
        ("chief", {"type": "failed"}),
        ("chief", {"type": "left", "rank": []}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_malformed_message_is_reported(together, sender, sent):
    def work(client, rank):
        client.exchange("start")
        if (sender == "chief") == (rank == 0):
            writer = client._coordinator._writers[1] if rank == 0 else None
            writer = writer or client._writer
            client._thread.call_soon(writer.write, encode(sent))
        with client.track_operation("step"):
            client.failed.wait(SOON)

    for error in together(2, work):
        assert isinstance(error, WorkerFailedError)
        assert f"{sender} sent a message that cannot be understood (of" in str(error)


def test_other_server_at_address_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        other = threading.Thread(target=answer)
        other.start()
        with pytest.raises(ClusterError, match="not the chief of this run"):
            join(server.getsockname()[1], 1, 2)
        other.join()


def test_silent_server_at_address_is_reported():
    """Whoever it is: the time for the chief to arrive goes on."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, pytest.raises(ClusterError, match="has not arrived within 1 s"):
        join(server.getsockname()[1], 1, 2, timeout=1.0)


def test_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use") as caught:
            join(port, 0, 2)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "KERAS_STRATEGY_PORT" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("node1", False)],
)
def test_chief_listens_on_its_address(port, host, local):
    if host == "::1" and not has_ipv6_loopback():
        pytest.skip("this machine has no IPv6")
    # Nobody but the chief can find a node of this name.
    ranks = range(2 if local else 1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = list(
            pool.map(
                lambda r: CoordinatorClient(
                    (host, port), r, names_of(len(ranks)), SOON
                ),
                ranks,
            )
        )
        assert clients[0]._coordinator is not None
        for at, _ in clients[0]._coordinator.addresses:
            assert ipaddress.ip_address(at).is_loopback == local
        agreed = list(pool.map(lambda m: m.exchange("step", m.rank), clients))
        assert agreed == [list(ranks)] * len(ranks)
    for client in clients[::-1]:
        client.leave()


def test_local_host_name_listens_locally(port):
    """And not all interfaces."""
    host = socket.gethostname()
    own = local_addresses(host)
    if not own:
        pytest.skip("the name of this machine stands for none of its addresses")
    listeners = open_listeners(host, port, all_local=True)
    try:
        assert [each.getsockname()[0] for each in listeners] == own
        assert not any(ipaddress.ip_address(at).is_unspecified for at in own)
    finally:
        for listener in listeners:
            listener.close()


def test_connections_use_keepalive(together):
    """Within 20 s, of which one that has gone silent leaves no trace otherwise."""

    def work(client, rank):
        writers = [client._writer]
        writers += client._coordinator._writers.values() if rank == 0 else []
        for writer in writers:
            connection = writer.get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            tcp = ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT", "NODELAY")
            idle, interval, count, unconfirmed, soon = (
                connection.getsockopt(
                    socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")
                )
                for name in tcp
            )
            assert idle + interval * count <= 20 and unconfirmed <= 20_000 and soon
        return len(writers)

    assert together(2, work) == [3, 1]


# What the environment and the cluster say.


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1:2222", "10.0.0.2:2222"], ("10.0.0.1", 2223)),
        (["localhost:2222", "localhost:2223", "127.0.0.1:2224"], ("localhost", 2225)),
        (["10.0.0.1:2222", "10.0.0.2:2223"], ("10.0.0.1", 2223)),
        (["node1:2222", ""], ("node1", 2223)),
        (["[::1]:2222"], ("::1", 2223)),
    ],
)
def test_coordinator_address(addresses, expected, monkeypatch):
    monkeypatch.delenv("KERAS_STRATEGY_PORT", raising=False)
    assert rendezvous_address(addresses) == expected
    monkeypatch.setenv("KERAS_STRATEGY_PORT", "9999")
    assert rendezvous_address(addresses) == (expected[0], 9999)


def test_default_port_is_of_the_job(monkeypatch):
    monkeypatch.delenv("KERAS_STRATEGY_PORT", raising=False)
    addresses = ["node1:8888", "node1:8889"]
    ports = {rendezvous_address(addresses, f"slurm {n}.0")[1] for n in range(70, 90)}
    assert len(ports) == 20 and ports <= set(range(20_000, 30_000))
    # A port that the user or the launcher chose is kept, as without a job.
    assert rendezvous_address(["node1:2222"], "slurm 70.0") == ("node1", 2223)
    assert rendezvous_address(addresses) == ("node1", 8890)
    monkeypatch.setenv("KERAS_STRATEGY_PORT", "9999")
    assert rendezvous_address(addresses, "slurm 70.0") == ("node1", 9999)


def test_two_jobs_at_once_do_not_meet(monkeypatch):
    monkeypatch.delenv("KERAS_STRATEGY_PORT", raising=False)
    addresses = ["127.0.0.1:8888", "127.0.0.1:8889"]

    def take_part(job: str, rank: int) -> list[str]:
        address = rendezvous_address(addresses, job)
        client = CoordinatorClient(address, rank, names_of(2), SOON, secret=job)
        try:
            return client.exchange("which job", job)
        finally:
            client.exchange("the end")
            client.leave()

    for number in range(0, 40, 2):
        jobs = [f"slurm {number}.0", f"slurm {number + 1}.0"]
        places = [
            (job, rank)
            for rank in (number // 2 % 2, 1 - number // 2 % 2)
            for job in jobs
        ]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda place: take_part(*place), places))
        assert found == [[job, job] for job, _ in places]


def test_address_without_rendezvous_port(monkeypatch):
    monkeypatch.delenv("KERAS_STRATEGY_PORT", raising=False)
    with pytest.raises(ValueError, match="'host:port'. Received: ''"):
        rendezvous_address(["", "10.0.0.2:1"])
    with pytest.raises(ValueError, match="has no port"):
        rendezvous_address(["node1"])
    with pytest.raises(ValueError, match="no port after the chief's"):
        rendezvous_address(["node1:65535"])
    monkeypatch.setenv("KERAS_STRATEGY_PORT", "http")
    with pytest.raises(ValueError, match="KERAS_STRATEGY_PORT.*Received: 'http'"):
        rendezvous_address(["node1:1"])


def test_default_timeout(monkeypatch):
    monkeypatch.delenv("KERAS_STRATEGY_TIMEOUT_SECONDS", raising=False)
    assert default_timeout_seconds() == 600
    monkeypatch.setenv("KERAS_STRATEGY_TIMEOUT_SECONDS", "2.5")
    assert default_timeout_seconds() == 2.5


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "10 s"])
def test_bad_timeout_is_refused(monkeypatch, value):
    monkeypatch.setenv("KERAS_STRATEGY_TIMEOUT_SECONDS", value)
    with pytest.raises(
        ValueError, match=f"KERAS_STRATEGY_TIMEOUT_SECONDS.*Received: '{value}'"
    ):
        default_timeout_seconds()
