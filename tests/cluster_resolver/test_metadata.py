import importlib.util

import pytest

from keras_strategy.cluster_resolver import google_api

ZONE = "/computeMetadata/v1/instance/zone"


def test_metadata_request_has_google_header(metadata_server):
    assert google_api.get_metadata("instance/zone") == "projects/1/zones/us-central1-b"
    ((path, headers),) = metadata_server.requests
    assert path == ZONE
    assert headers["metadata-flavor"] == "Google"


def test_older_host_variable_is_read(metadata_server, monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST")
    monkeypatch.setenv("GCE_METADATA_IP", metadata_server.host)
    assert google_api.get_metadata("project/project-id") == "my-project"


def test_metadata_request_bypasses_proxy(metadata_server, make_server, monkeypatch):
    proxy = make_server()
    monkeypatch.setenv("http_proxy", proxy.url)
    # A copy of its own: which proxy to use is settled when a module is loaded.
    spec = importlib.util.spec_from_file_location("metadata_copy", google_api.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.get_metadata("project/project-id") == "my-project"
    assert proxy.requests == []


WRONG = {
    "missing": lambda server: (404, "no"),
    "error": lambda server: (500, "no"),
    "redirect": lambda server: (302, "", {"Location": f"{server.url}/x"}),
    "impostor": lambda server: (200, "a", {"Metadata-Flavor": None}),
    "not text": lambda server: b"\xff\xfe",
    "garbage": lambda server: server.GARBAGE,
    "hang": lambda server: server.HANG,
    "drip": lambda server: server.DRIP,
    "too long": lambda server: b"x" * (google_api._MAX_BYTES + 1),
}
WORDS = {
    "missing": "HTTP 404 for instance/zone",
    "error": "HTTP 500",
    "redirect": "HTTP 302",
    "impostor": "header Metadata-Flavor",
    "not text": "did not answer with text",
    "garbage": "No Google Cloud metadata server at 127.0.0.1",
    "hang": "No Google Cloud metadata server.*timed out",
    "drip": "No Google Cloud metadata server.*timed out",
    "too long": "the answer is too long",
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_answer_is_an_error_in_time(metadata_server, monkeypatch, case):
    # What answers is given time; those two would never be done.
    seconds = 0.2 if case in ("hang", "drip") else 30.0
    monkeypatch.setattr(google_api, "_METADATA_TIMEOUT_SECONDS", seconds)
    metadata_server.answers[ZONE] = WRONG[case](metadata_server)
    with pytest.raises(google_api.MetadataError, match=WORDS[case]):
        google_api.get_metadata("instance/zone")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "127.0.0.1:no-port", "[", "127.0.0.1 x"]
)
def test_missing_server_is_reported(monkeypatch, host):
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    with pytest.raises(
        google_api.MetadataError, match="No Google Cloud metadata server"
    ):
        google_api.get_metadata("instance/zone")


def test_metadata_request_times_out():
    assert 0 < google_api._METADATA_TIMEOUT_SECONDS <= 5
