import json
import logging
import socket
import ssl
import traceback

import pytest

from keras_strategy.cluster_resolver import TPUClusterResolver, google_api

httplib2 = pytest.importorskip("httplib2")
trustme = pytest.importorskip("trustme")
discovery = pytest.importorskip("googleapiclient.discovery")
AnonymousCredentials = pytest.importorskip(
    "google.auth.credentials"
).AnonymousCredentials
Credentials = pytest.importorskip("google.oauth2.credentials").Credentials

NODE = "/v1/projects/my-project/locations/us-central1-b/nodes/my-tpu"
ATTRIBUTES = "/computeMetadata/v1/instance/attributes"
READY = {
    "state": "READY",
    "networkEndpoints": [
        {"ipAddress": "10.0.0.1", "port": 8470},
        {"ipAddress": "10.0.0.2", "port": 8471},
    ],
}
TOKEN = "ya29.SECRET"


def service_at(url, seconds=30.0, **kwargs):
    """The real client library, with Google's own description of the API."""
    return discovery.build(
        "tpu",
        "v1",
        http=httplib2.Http(timeout=seconds),
        client_options={"api_endpoint": url},
        **kwargs,
    )


@pytest.fixture
def tpu_api(server):
    server.answers[NODE] = json.dumps(READY)
    return server


def named(tpu_api, tpu="my-tpu", **kwargs):
    kwargs = {"zone": "us-central1-b", "project": "my-project", **kwargs}
    kwargs.setdefault("service", service_at(tpu_api.url))
    return TPUClusterResolver(tpu, **kwargs)


def test_tpu_by_name(tpu_api):
    resolver = named(tpu_api)
    assert tpu_api.requests == []
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8471"]}
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.get_master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1, rpc_layer="x") == "grpc://10.0.0.2:8471"
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.get_job_name() == "worker"
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    assert resolver.environment == ""


def test_cluster_is_looked_up_on_each_call(tpu_api):
    resolver = named(tpu_api)
    assert resolver.cluster_spec().num_tasks("worker") == 2
    tpu_api.answers[NODE] = json.dumps({**READY, "state": "PREEMPTED"})
    with pytest.raises(RuntimeError, match='"my-tpu" is not yet ready.*"PREEMPTED"'):
        resolver.cluster_spec()


def test_older_api_answer(tpu_api):
    old = {"state": "READY", "ipAddress": "10.0.0.7", "port": "8470"}
    tpu_api.answers[NODE] = json.dumps(old)
    assert named(tpu_api).cluster_spec().job_tasks("worker") == ["10.0.0.7:8470"]


def test_zone_and_project_from_metadata(tpu_api, metadata_server):
    # One server plays both: `server` is the same in the two fixtures.
    resolver = named(tpu_api, zone=None, project=None)
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_coordinator_is_listed_when_named(tpu_api):
    address = {"coordinator_address": "10.1.0.1:1"}
    assert named(tpu_api, **address).cluster_spec().jobs == ["worker"]
    resolver = named(tpu_api, job_name="tpu_worker", coordinator_name="boss", **address)
    assert resolver.cluster_spec().as_dict() == {
        "tpu_worker": ["10.0.0.1:8470", "10.0.0.2:8471"],
        "boss": ["10.1.0.1:1"],
    }
    assert resolver.task_type == "tpu_worker"
    with pytest.raises(ValueError, match="`coordinator_address`.*'boss'"):
        named(tpu_api, coordinator_name="boss")
    with pytest.raises(ValueError, match="`coordinator_name` to differ"):
        named(tpu_api, coordinator_name="worker", **address)


def test_credentials_are_ignored_with_a_service(tpu_api):
    named(tpu_api, credentials=object()).cluster_spec()


@pytest.mark.parametrize(
    "tpu, addresses",
    [
        ("grpc://10.0.0.1:8470", ["10.0.0.1:8470"]),
        ("grpc://10.0.0.1", ["10.0.0.1:8470"]),
        ("grpc://10.0.0.1:1,grpc://10.0.0.2:2", ["10.0.0.1:1", "10.0.0.2:2"]),
        ("grpc://10.0.0.1:1,10.0.0.2:2", ["10.0.0.1:1", "10.0.0.2:2"]),
        ("grpc://[fe80::1]:7,grpc://fe80::2", ["[fe80::1]:7", "[fe80::2]:8470"]),
        (["grpc://10.0.0.1:8470"], ["10.0.0.1:8470"]),
    ],
)
def test_tpu_by_addresses(tpu, addresses):
    resolver = TPUClusterResolver(tpu)
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert resolver.master() == f"grpc://{addresses[0]}"


@pytest.mark.parametrize("tpu", ["local", ["local"]])
def test_local_tpu(tpu):
    resolver = TPUClusterResolver(tpu)
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert resolver.task_id == 0


@pytest.mark.parametrize(
    "variables, addresses",
    [
        (
            {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.1:1,grpc://10.0.0.2:2"},
            ["10.0.0.1:1", "10.0.0.2:2"],
        ),
        ({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "10.0.0.1:1"}, ["10.0.0.1:1"]),
        ({"TPU_NAME": "grpc://10.0.0.3:3"}, ["10.0.0.3:3"]),
        ({"TPU_NAME": "my-tpu"}, ["10.0.0.1:8470", "10.0.0.2:8471"]),
        (
            {"TPU_CONFIG": '{"tpu_node_name": "my-tpu"}'},
            ["10.0.0.1:8470", "10.0.0.2:8471"],
        ),
        ({"TPU_WORKER_HOSTNAMES": "h0,h1"}, ["h0:8470", "h1:8470"]),
    ],
)
@pytest.mark.parametrize("tpu", [None, ""])
def test_tpu_from_environment(tpu_api, monkeypatch, tpu, variables, addresses):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert named(tpu_api, tpu).cluster_spec().job_tasks("worker") == addresses


def test_environment_variable_order(tpu_api, monkeypatch):
    values = [
        ("TPU_WORKER_HOSTNAMES", "h0"),
        ("TPU_CONFIG", '{"tpu_node_name": "grpc://h1"}'),
        ("TPU_NAME", "grpc://h2"),
        ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "h3"),
    ]
    for number, (name, value) in enumerate(values):
        monkeypatch.setenv(name, value)
        assert TPUClusterResolver().master() == f"grpc://h{number}:8470"
    assert TPUClusterResolver("grpc://h9").master() == "grpc://h9:8470"


def test_tpu_config_has_project_and_zone(tpu_api, monkeypatch):
    config = {
        "tpu_node_name": "my-tpu",
        "project": "my-project",
        "zone": "us-central1-b",
    }
    monkeypatch.setenv("TPU_CONFIG", json.dumps(config))
    resolver = TPUClusterResolver(service=service_at(tpu_api.url))
    assert resolver.cluster_spec().num_tasks("worker") == 2


@pytest.mark.parametrize("value", ["{", "[]", '{"zone": 1}', "[" * 100_000])
def test_bad_tpu_config_is_refused(monkeypatch, value):
    monkeypatch.setenv("TPU_CONFIG", value)
    with pytest.raises(ValueError, match="TPU_CONFIG to be a JSON object"):
        TPUClusterResolver()


@pytest.mark.parametrize(
    "endpoints, addresses",
    [
        ("10.0.0.1,10.0.0.2", ["10.0.0.1:8470", "10.0.0.2:8470"]),
        ("a:0:10.0.0.1,b:1:10.0.0.2", ["10.0.0.1:8470", "10.0.0.2:8470"]),
    ],
)
def test_tpu_vm(metadata_server, endpoints, addresses):
    metadata_server.answers[f"{ATTRIBUTES}/worker-network-endpoints"] = endpoints
    metadata_server.answers[f"{ATTRIBUTES}/agent-worker-number"] = "1"
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert resolver.task_id == 1
    assert resolver.master() == f"grpc://{addresses[0]}"


def test_tpu_vm_with_bad_metadata(metadata_server):
    metadata_server.answers[f"{ATTRIBUTES}/worker-network-endpoints"] = "a:b"
    metadata_server.answers[f"{ATTRIBUTES}/agent-worker-number"] = "<html>"
    resolver = TPUClusterResolver()
    with pytest.raises(RuntimeError, match="worker-network-endpoints.*'a:b'"):
        resolver.cluster_spec()
    with pytest.raises(ValueError, match="agent-worker-number.*'<html>'"):
        resolver.task_id  # noqa: B018


def test_worker_index_of_this_host(monkeypatch):
    own = TPUClusterResolver("grpc://10.255.255.1:1,grpc://127.0.0.1:2,grpc://host:3")
    assert own.task_id == 1
    assert own.master() == "grpc://10.255.255.1:1"
    assert TPUClusterResolver("grpc://10.255.255.1:1").task_id == 0
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    assert TPUClusterResolver("grpc://10.255.255.1:1").task_id == 2
    assert own.task_id == 1
    own.task_id = 0
    assert own.task_id == 0
    monkeypatch.setenv("TPU_WORKER_ID", "x")
    with pytest.raises(ValueError, match="TPU_WORKER_ID.*'x'"):
        TPUClusterResolver("grpc://10.255.255.1:1").task_id  # noqa: B018


def test_missing_tpu_is_reported(monkeypatch):
    for tpu in (None, ""):
        with pytest.raises(ValueError, match="Please provide a TPU name"):
            TPUClusterResolver(tpu)
    with pytest.raises(ValueError, match="At least one TPU"):
        TPUClusterResolver([])
    with pytest.raises(NotImplementedError, match="multiple TPUs.*'a', 'b'"):
        TPUClusterResolver(["a", "b"])
    with pytest.raises(TypeError, match="`tpu`.*Received: 7"):
        TPUClusterResolver(7)
    with pytest.raises(ValueError, match="`tpu`.*'grpc://'"):
        TPUClusterResolver("grpc://")
    with pytest.raises(ValueError, match="port in `tpu`.*'x'"):
        TPUClusterResolver("grpc://10.0.0.1:x")


def test_missing_tpu_on_google_cloud(metadata_server):
    with pytest.raises(RuntimeError, match="on Google Cloud it cannot be empty"):
        TPUClusterResolver("")
    with pytest.raises(ValueError, match="Please provide a TPU name"):
        TPUClusterResolver()


def test_missing_zone_is_reported():
    with pytest.raises(RuntimeError, match="`project`, or a metadata server"):
        TPUClusterResolver("my-tpu", zone="z")
    with pytest.raises(RuntimeError, match="`zone`, or a metadata server"):
        TPUClusterResolver("my-tpu", project="p")


def test_bad_zone_is_refused(metadata_server):
    metadata_server.answers["/computeMetadata/v1/instance/zone"] = "<html>log in"
    with pytest.raises(RuntimeError, match="instance/zone to be a zone.*<html>"):
        TPUClusterResolver("my-tpu")


@pytest.mark.parametrize(
    "case",
    [
        *("404", "403", "500", "HANG", "GARBAGE", "no json", "a list"),
        *("no addresses", "no port", "an odd port", "an odd host"),
    ],
)
def test_no_answer_is_reported(tpu_api, caplog, case):
    ends = {
        "no addresses": [],
        "no port": [{"ipAddress": "10.0.0.1"}],
        "an odd port": [{"ipAddress": "10.0.0.1", "port": "SERVER TEXT"}],
        "an odd host": [{"ipAddress": 7, "port": 1}],
    }
    answers = {
        "HANG": tpu_api.HANG,
        "GARBAGE": tpu_api.GARBAGE,
        "no json": "SERVER TEXT",
        "a list": "[]",
        **{c: json.dumps({**READY, "networkEndpoints": e}) for c, e in ends.items()},
    }
    if case not in answers:
        answers[case] = (int(case), json.dumps({"error": {"message": "SERVER TEXT"}}))
    tpu_api.answers[NODE] = answers[case]
    caplog.set_level(logging.DEBUG, "keras_strategy")
    # An API key is part of every URL, and of the library's errors.
    seconds = 1.0 if case == "HANG" else 30.0
    service = service_at(tpu_api.url, seconds, developerKey="SECRET")
    resolver = named(tpu_api, service=service)
    words = "Could not lookup TPU metadata from name 'my-tpu'"
    with pytest.raises(ValueError, match=words) as caught:
        resolver.cluster_spec()
    text = "".join(traceback.format_exception(caught.value))
    assert "SECRET" in tpu_api.requests[0][0]
    assert "SECRET" not in text + caplog.text
    assert "SERVER TEXT" not in text
    if case in ("404", "403", "500"):
        assert f"HTTP {case}" in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "../x", "a?b"])
def test_name_is_never_a_url(tpu_api, name):
    with pytest.raises(ValueError, match="Could not lookup TPU metadata"):
        named(tpu_api, name).cluster_spec()
    assert not any(path.startswith(NODE) for path, _ in tpu_api.requests)


@pytest.mark.parametrize("url", ["http://127.0.0.1/{api}/{apiVersion}", "file:///x"])
def test_discovery_requires_https(tpu_api, monkeypatch, url):
    with pytest.raises(ValueError, match="`discovery_url` to begin with https://"):
        named(tpu_api, discovery_url=url)
    monkeypatch.setenv("TPU_API_DISCOVERY_URL", url)
    with pytest.raises(ValueError, match="TPU_API_DISCOVERY_URL to begin with https"):
        named(tpu_api, discovery_url="https://127.0.0.1/")
    assert tpu_api.requests == []


@pytest.fixture
def https_api(make_server, monkeypatch, tmp_path):
    """The TPU API and its description, by https."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setattr(httplib2, "CA_CERTS", str(tmp_path / "ca.pem"))
    server = make_server(context)
    server.answers[NODE] = json.dumps(READY)
    server.answers["/tpu/v1"] = json.dumps(description(server.url))
    return server


def description(url):
    static = discovery.build("tpu", "v1", credentials=AnonymousCredentials())
    return {**static._rootDesc, "rootUrl": url + "/", "servicePath": ""}


@pytest.mark.parametrize("by_variable", [False, True])
def test_discovery_url_is_used(https_api, monkeypatch, caplog, by_variable):
    caplog.set_level(logging.DEBUG)
    url = https_api.url + "/{api}/{apiVersion}"
    if by_variable:
        monkeypatch.setenv("TPU_API_DISCOVERY_URL", url)
        url = "https://127.0.0.1:1/"
    resolver = named(
        https_api, service=None, credentials=Credentials(TOKEN), discovery_url=url
    )
    assert resolver.cluster_spec().num_tasks("worker") == 2
    node_requests = [h for path, h in https_api.requests if path.startswith(NODE)]
    assert node_requests[0]["authorization"] == f"Bearer {TOKEN}"
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        lambda plain: json.dumps(description(plain.url)),
        lambda plain: (302, "", {"Location": plain.url + "/tpu/v1"}),
    ],
    ids=["service", "redirect"],
)
def test_token_is_never_sent_unencrypted(answer, https_api, make_server):
    plain = make_server()
    plain.answers[NODE] = json.dumps(READY)
    https_api.answers["/tpu/v1"] = answer(plain)
    with pytest.raises(ValueError, match="Could not lookup TPU metadata"):
        named(
            https_api,
            service=None,
            credentials=Credentials(TOKEN),
            discovery_url=https_api.url + "/{api}/{apiVersion}",
        ).cluster_spec()
    assert plain.requests == []


def test_requests_time_out(https_api, monkeypatch):
    assert 0 < google_api._API_TIMEOUT_SECONDS <= 5
    monkeypatch.setattr(google_api, "_API_TIMEOUT_SECONDS", 1.0)
    https_api.answers[NODE] = https_api.HANG
    resolver = named(
        https_api,
        service=None,
        credentials=Credentials(TOKEN),
        discovery_url=https_api.url + "/{api}/{apiVersion}",
    )
    # The server would wait for longer than the test may take.
    with pytest.raises(ValueError, match="Could not lookup TPU metadata"):
        resolver.cluster_spec()


def test_missing_default_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(ValueError, match="Could not lookup.*DefaultCredentialsError"):
        TPUClusterResolver("my-tpu", "zone", "project").cluster_spec()


def test_connect_looks_up_the_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    TPUClusterResolver("my-tpu", "zone", "project")
    with pytest.raises(ValueError, match="Could not lookup TPU metadata"):
        TPUClusterResolver.connect("my-tpu", "zone", "project")
    resolver = TPUClusterResolver.connect("grpc://10.0.0.1:8470")
    assert resolver.master() == "grpc://10.0.0.1:8470"
    with resolver as entered:
        assert entered is resolver


def test_place_needs_only_a_socket(monkeypatch):
    """No datagram is sent, and no name is looked up."""

    def refuse(*args):
        raise AssertionError("something was sent")

    for name in ("send", "sendto", "sendall"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert TPUClusterResolver("grpc://host:1,grpc://127.0.0.1:1").task_id == 1


def test_device_coordinates_are_read():
    """The messages are TensorFlow's, of a TPU with such devices and of one without."""
    resolver = TPUClusterResolver("grpc://10.0.0.1:8470")
    assert resolver.tpu_hardware_feature is None
    topology = bytes.fromhex("0a04010101021001180222080000000000000001")
    resolver.set_tpu_topology(topology + bytes.fromhex("2a0408021004"))
    feature = resolver.tpu_hardware_feature
    assert feature == (2, 4) and feature.embedding_feature.name == "V2"
    assert feature.num_embedding_devices_per_chip == 4
    resolver.set_tpu_topology(topology)
    assert resolver.tpu_hardware_feature == (0, 0)
    with pytest.raises(ValueError, match="not a TopologyProto"):
        resolver.set_tpu_topology(b"\xff")
    assert resolver.tpu_hardware_feature == (0, 0)
