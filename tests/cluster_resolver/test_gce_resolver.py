import json
import traceback

import pytest

from keras_strategy.cluster_resolver import GCEClusterResolver

httplib2 = pytest.importorskip("httplib2")
discovery = pytest.importorskip("googleapiclient.discovery")
AnonymousCredentials = pytest.importorskip(
    "google.auth.credentials"
).AnonymousCredentials

GROUP = "/projects/p/zones/z/instanceGroups/g/listInstances"


@pytest.fixture(scope="module")
def build():
    """The real client library, with Google's own description of the API."""

    def build(url, seconds=30.0, **kwargs):
        return discovery.build(
            "compute",
            "v1",
            http=httplib2.Http(timeout=seconds),
            client_options={"api_endpoint": url + "/"},
            **kwargs,
        )

    return build


@pytest.fixture
def resolver(server, build):
    return GCEClusterResolver("p", "z", "g", 8470, service=build(server.url))


def machine(server, name, address):
    server.answers[f"/projects/p/zones/z/instances/{name}"] = json.dumps(
        {"networkInterfaces": [{"networkIP": address}]}
    )
    return {"instance": f"https://host/projects/p/zones/z/instances/{name}"}


def test_running_machines_are_listed_in_order(server, resolver):
    items = [machine(server, "b", "10.0.0.2"), machine(server, "a", "10.0.0.1")]
    server.answers[GROUP] = json.dumps({"items": items})
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1, "x") == "x://10.0.0.2:8470"
    assert "orderBy=name" in server.requests[0][0]
    resolver.task_id = None
    assert resolver.master() == ""


def test_paged_answer_is_read(server, build):
    pages = [
        json.dumps({"items": [machine(server, "a", "10.0.0.1")], "nextPageToken": "t"}),
        json.dumps({"items": [machine(server, "b", "10.0.0.2")]}),
    ]

    class Pages(dict):
        def get(self, path, default=None):
            return pages.pop(0) if path == GROUP else super().get(path, default)

    server.answers = Pages(server.answers)
    resolver = GCEClusterResolver("p", "z", "g", 1, service=build(server.url))
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_empty_group(server, resolver):
    server.answers[GROUP] = "{}"
    assert resolver.cluster_spec().num_tasks("worker") == 0


def test_task_is_the_given_one(server, build):
    resolver = GCEClusterResolver(
        "p", "z", "g", 1, "ps", 2, rpc_layer=None, service=build(server.url)
    )
    assert (resolver.task_type, resolver.task_id) == ("ps", 2)
    assert resolver.rpc_layer is None
    resolver.task_id = 1
    resolver.rpc_layer = "grpc"
    assert (resolver.task_id, resolver.rpc_layer) == (1, "grpc")
    with pytest.raises(RuntimeError, match="cannot reset the task_type.*'worker'"):
        resolver.task_type = "worker"


@pytest.mark.parametrize("case", ["403", "HANG", "GARBAGE", "no json", "no address"])
def test_no_answer_is_reported(server, build, case):
    answer = {
        "403": (403, json.dumps({"error": {"message": "SERVER TEXT"}})),
        "HANG": server.HANG,
        "GARBAGE": server.GARBAGE,
        "no json": "SERVER TEXT",
        "no address": json.dumps({"items": [{"instance": "x"}]}),
    }[case]
    server.answers[GROUP] = answer
    # An API key is part of every URL, and of the library's errors.
    seconds = 1.0 if case == "HANG" else 30.0
    service = build(server.url, seconds, developerKey="SECRET")
    resolver = GCEClusterResolver("p", "z", "g", 1, service=service)
    with pytest.raises(RuntimeError, match="instance group 'g'.*'p'.*'z'") as caught:
        resolver.cluster_spec()
    text = "".join(traceback.format_exception(caught.value))
    assert "SECRET" in server.requests[0][0]
    assert "SECRET" not in text
    assert "SERVER TEXT" not in text
    if case == "403":
        assert "HTTP 403" in str(caught.value)


def test_given_service_is_used():
    credentials = AnonymousCredentials()
    resolver = GCEClusterResolver("p", "z", "g", 1, credentials=credentials)
    assert resolver.task_id == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`port`.*'x'"):
        GCEClusterResolver("p", "z", "g", "x", service=object())
