"""A clean environment, a network that ends at this machine, and local servers."""

import contextlib
import http.server
import os
import socket
import threading

import pytest

# Whatever the machine that runs the tests is part of, the tests are not.
PREFIXES = (
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "SM_",
    "SLURM_",
    "TPU_",
    "KUBE",
    "JOB_COMPLETION_INDEX",
    "GCE_",
    "GOOGLE_",
    "CUDA_VISIBLE_DEVICES",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "NO_PROXY",
)
LOCAL = ("127.0.0.1", "localhost", "::1")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    # Nothing listens on port 1: no metadata server, and an answer at once.
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    # Google's credentials look for a Google Cloud machine only when told so.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    before = dict(os.environ)
    yield
    # What a test changes goes through monkeypatch or mock.patch.dict; Slurm's
    # CUDA_VISIBLE_DEVICES is set by the code under test.
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_call_leaves_the_machine(monkeypatch):
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def checked_connect(self, address):
        # A datagram socket's connect sends nothing.
        if self.type == socket.SOCK_STREAM and self.family != socket.AF_UNIX:
            assert address[0] in LOCAL, f"a call to {address} left the machine"
        return connect(self, address)

    def checked_lookup(host, *args, **kwargs):
        assert host in LOCAL, f"a look-up of {host!r} left the machine"
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setattr(socket, "getaddrinfo", checked_lookup)


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.is_alive()]
    assert not left, f"threads left behind: {left}"


class Server:
    """A local HTTP server that answers what a test tells it to.

    `answers` maps a path (without the query) to a body, or to (status, body) or
    (status, body, headers). `HANG` never answers, `DRIP` does so without end,
    `GARBAGE` is no HTTP.
    """

    HANG = object()
    DRIP = object()
    GARBAGE = object()

    def __init__(self, tls_context=None):
        self.answers = {}
        self.default = (404, b"not found")
        self.requests = []
        self._released = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer._answer(self)

            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer._answer(self)

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        scheme = "http"
        if tls_context is not None:
            scheme = "https"
            self._server.socket = tls_context.wrap_socket(
                self._server.socket, server_side=True
            )
        self.port = self._server.server_address[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"{scheme}://{self.host}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def _answer(self, request):
        path = request.path.partition("?")[0]
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers))
        answer = self.answers.get(path, self.default)
        if answer is self.HANG:
            self._released.wait()
            request.close_connection = True
            return
        if answer is self.DRIP:
            request.wfile.write(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
            with contextlib.suppress(OSError):
                while not self._released.wait(0.02):
                    request.wfile.write(b"x")
            return
        if answer is self.GARBAGE:
            request.wfile.write(b"\x00\xffthis is no HTTP\r\n\r\n")
            request.close_connection = True
            return
        answer = answer if isinstance(answer, tuple) else (200, answer)
        status, body, headers = (*answer, {})[:3]
        body = body.encode() if isinstance(body, str) else body
        request.send_response(status)
        for name, value in {"Metadata-Flavor": "Google", **headers}.items():
            if value is not None:
                request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def close(self):
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def make_server():
    servers = []

    def make(tls_context=None):
        servers.append(Server(tls_context))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def metadata_server(server, monkeypatch):
    """A metadata server of a machine that is no TPU VM."""
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    server.answers.update(
        {
            "/computeMetadata/v1/project/project-id": "my-project",
            "/computeMetadata/v1/instance/zone": "projects/1/zones/us-central1-b",
        }
    )
    return server
