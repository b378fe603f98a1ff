import json
import logging
import ssl
import traceback
from urllib.parse import parse_qs, urlsplit

import pytest

from keras_strategy.cluster_resolver import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    detect,
)
from keras_strategy.cluster_resolver import kubernetes as module

trustme = pytest.importorskip("trustme")
client = pytest.importorskip("kubernetes.client")
incluster_config = pytest.importorskip("kubernetes.config.incluster_config")

PODS = "/api/v1/pods"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.SECRET"


def pod(name, ip, phase="Running", index=None, host_ip="192.168.0.1", created=0):
    annotations = {}
    if index is not None:
        annotations["batch.kubernetes.io/job-completion-index"] = str(index)
    return {
        "metadata": {
            "name": name,
            "annotations": annotations,
            "creationTimestamp": f"2026-11-30T12:00:{created:02}Z",
        },
        "status": {"phase": phase, "podIP": ip, "hostIP": host_ip},
    }


def pods(*items):
    return (
        200,
        json.dumps({"kind": "PodList", "items": list(items)}),
        {"Content-Type": "application/json"},
    )


@pytest.fixture
def api(server):
    """The real client, pointed at the local server."""
    configuration = client.Configuration(host=server.url)
    configuration.api_key["BearerToken"] = f"Bearer {TOKEN}"
    configuration.retries = 0
    with client.ApiClient(configuration) as api_client:
        yield client.CoreV1Api(api_client)


@pytest.fixture
def resolver(api):
    return KubernetesClusterResolver(
        {"worker": ["job-name=train"]}, override_client=api
    )


def test_running_pods_are_sorted_by_name(server, resolver):
    server.answers[PODS] = pods(pod("b", "10.0.0.2"), pod("a", "10.0.0.1"))
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    query = parse_qs(urlsplit(server.requests[0][0]).query)
    assert query["labelSelector"] == ["job-name=train"]


def test_indexed_pods_are_sorted_by_index(server, resolver):
    server.answers[PODS] = pods(
        *(pod(f"train-{i}-x", f"10.0.0.{i}", index=i) for i in (10, 2, 1))
    )
    assert resolver.cluster_spec().job_tasks("worker") == [
        "10.0.0.1:8470",
        "10.0.0.2:8470",
        "10.0.0.10:8470",
    ]


def test_newest_pod_of_an_index_counts(server, resolver):
    server.answers[PODS] = pods(
        pod("train-0-new", "10.0.0.3", index=0, created=10),
        pod("train-0-old", None, "Failed", index=0, created=9),
        pod("train-1-a", "10.0.0.2", index=1),
    )
    addresses = ["10.0.0.3:8470", "10.0.0.2:8470"]
    assert resolver.cluster_spec().job_tasks("worker") == addresses


def test_pod_lists_its_own_namespace(pod_of_a_cluster, monkeypatch, tmp_path):
    (tmp_path / "namespace").write_text("team\n")
    monkeypatch.setattr(module, "_NAMESPACE_FILE", str(tmp_path / "namespace"))
    own, every = pods(pod("a", "10.0.0.1")), pods(pod("b", "10.0.0.2"))
    pod_of_a_cluster.answers = {"/api/v1/namespaces/team/pods": own, PODS: every}
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.1:8470"]
    resolver = KubernetesClusterResolver(override_client=resolver._client)
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.2:8470"]


def test_jobs_and_selectors(server, api):
    found = {
        "a=1": pods(pod("p1", "10.0.0.1")),
        "a=2": pods(pod("p0", "10.0.0.2")),
        "b=1": pods(pod("p9", "10.0.0.9")),
    }

    class BySelector(dict):
        def get(self, path, default=None):
            query = parse_qs(urlsplit(server.requests[-1][0]).query)
            return found[query["labelSelector"][0]]

    server.answers = BySelector()
    resolver = KubernetesClusterResolver(
        {"worker": ["a=1", "a=2"], "ps": ["b=1"]}, 99, override_client=api
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:99", "10.0.0.2:99"],
        "ps": ["10.0.0.9:99"],
    }


def test_master(server, resolver):
    server.answers[PODS] = pods(pod("a", "10.0.0.1"), pod("b", "fe80::2"))
    assert resolver.master() == ""
    assert server.requests == []
    assert (resolver.task_type, resolver.task_id) == (None, None)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://[fe80::2]:8470"
    assert resolver.master("worker", 0, "x") == "x://10.0.0.1:8470"


def test_default_selector(server, api):
    server.answers[PODS] = pods(pod("a", "10.0.0.1"))
    KubernetesClusterResolver(override_client=api).cluster_spec()
    assert "job-name%3Dtensorflow" in server.requests[0][0]


def test_pod_on_host_network(server, resolver):
    server.answers[PODS] = pods(pod("a", None))
    assert resolver.cluster_spec().job_tasks("worker") == ["192.168.0.1:8470"]


def test_waiting_pods_are_reported(server, resolver):
    server.answers[PODS] = pods(
        pod("a", "10.0.0.1"), pod("b", None, "Pending"), pod("c", None, "Failed")
    )
    with pytest.raises(RuntimeError) as caught:
        resolver.cluster_spec()
    assert 'pod "b" is not running; phase: "Pending"' in str(caught.value)
    assert 'pod "c" is not running; phase: "Failed"' in str(caught.value)
    assert '"a"' not in str(caught.value)


def test_missing_pods_are_reported(server, resolver):
    server.answers[PODS] = pods()
    with pytest.raises(RuntimeError, match="`job_to_label_mapping`.*'job-name=train'"):
        resolver.cluster_spec()


def test_pod_without_address_is_reported(server, resolver):
    server.answers[PODS] = pods(pod("a", None, host_ip=None))
    with pytest.raises(RuntimeError, match='pod "a" without one'):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    "case, words",
    [
        ("403", r"HTTP 403.*ClusterRole.*resources: \[\"pods\"\], verbs: \[\"list\"\]"),
        ("401", "HTTP 401.*ClusterRole"),
        ("500", "HTTP 500"),
        ("HANG", "Could not query the Kubernetes API.*'job-name=train'"),
        ("GARBAGE", "Could not query the Kubernetes API"),
        ("no json", "Could not query the Kubernetes API"),
    ],
)
def test_no_answer_is_reported(server, resolver, monkeypatch, caplog, case, words):
    # What answers is given time; the server that does not would wait for ever.
    seconds = 1.0 if case == "HANG" else 30.0
    monkeypatch.setattr(module, "_CONNECT_AND_READ_SECONDS", (seconds, seconds))
    caplog.set_level(logging.DEBUG)
    server.answers[PODS] = {
        "HANG": server.HANG,
        "GARBAGE": server.GARBAGE,
        "no json": (200, "SERVER TEXT", {"Content-Type": "application/json"}),
    }.get(case) or (int(case), "SERVER TEXT")
    with pytest.raises(RuntimeError, match=words) as caught:
        resolver.cluster_spec()
    assert TOKEN in str(server.requests)
    text = "".join(traceback.format_exception(caught.value))
    assert "SERVER TEXT" not in text
    assert "SECRET" not in text
    assert "SECRET" not in caplog.text


def test_requests_time_out():
    assert all(0 < seconds <= 5 for seconds in module._CONNECT_AND_READ_SECONDS)


@pytest.fixture
def pod_of_a_cluster(make_server, monkeypatch, tmp_path):
    """Files and API of a pod: https, its certificate, and a token."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(
        incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token")
    )
    monkeypatch.setattr(
        incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt")
    )
    server = make_server(context)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    server.answers[PODS] = pods(
        pod("train-1-x", "10.0.0.1", index=1), pod("train-0-x", "10.0.0.2", index=0)
    )
    return server


def test_in_cluster_configuration(pod_of_a_cluster, caplog):
    caplog.set_level(logging.DEBUG)
    resolver = KubernetesClusterResolver()
    addresses = ["10.0.0.2:8470", "10.0.0.1:8470"]
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert pod_of_a_cluster.requests[0][1]["authorization"] == f"bearer {TOKEN}"
    assert "SECRET" not in caplog.text


def test_indexed_job_is_detected(pod_of_a_cluster, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("HOSTNAME", "train-1")
    resolver = detect().resolver()
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert "job-name%3Dtrain" in pod_of_a_cluster.requests[0][0]
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def kubeconfig(path, url):
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )


def test_outside_cluster_configuration(server, monkeypatch, tmp_path):
    kubeconfig(tmp_path / "config", server.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    server.answers[PODS] = pods(pod("a", "10.0.0.1"))
    resolver = KubernetesClusterResolver(
        executable_location=KubernetesExecutableLocation.OFF_CLUSTER
    )
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.1:8470"]
    assert server.requests[0][1]["authorization"] == f"Bearer {TOKEN}"


def test_missing_configuration_is_reported(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="WITHIN_CLUSTER; pass `executable_"):
        KubernetesClusterResolver()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="OFF_CLUSTER; pass.*KUBECONFIG"):
        KubernetesClusterResolver(
            executable_location=KubernetesExecutableLocation.OFF_CLUSTER
        )


def test_bad_configuration_is_not_quoted(monkeypatch, tmp_path):
    (tmp_path / "config").write_text(f"users: [token: {TOKEN}: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(RuntimeError, match="OFF_CLUSTER; pass.*Error") as caught:
        KubernetesClusterResolver(
            executable_location=KubernetesExecutableLocation.OFF_CLUSTER
        )
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_bad_arguments_are_refused(api):
    with pytest.raises(ValueError, match="`executable_location`.*'here'"):
        KubernetesClusterResolver(executable_location="here")
    with pytest.raises(ValueError, match="`job_to_label_mapping`.*'a=1' for 'worker'"):
        KubernetesClusterResolver({"worker": "a=1"}, override_client=api)
    with pytest.raises(ValueError, match="`tf_server_port`"):
        KubernetesClusterResolver(tf_server_port=0, override_client=api)
