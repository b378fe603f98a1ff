"""Google Cloud's API client and metadata server, with time limits and without leaks."""

import http.client
import os
import time
import urllib.error
import urllib.request
from typing import Any

from keras_strategy.cluster_resolver.base import import_extra

_API_TIMEOUT_SECONDS = 5.0
_METADATA_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 20


def build_service(
    name: str,
    version: str,
    credentials: Any,
    extra: str,
    user: str,
    discovery_url: str | None = None,
) -> Any:
    """Make the client of an API; `extra` installs its library for `user`."""
    discovery = import_extra("googleapiclient.discovery", extra, user)
    if credentials is None or credentials == "default":
        google_auth = import_extra("google.auth", extra, user)
        credentials, _ = google_auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    httplib2 = import_extra("httplib2", extra, user)
    google_auth_httplib2 = import_extra("google_auth_httplib2", extra, user)

    class HttpsOnly(google_auth_httplib2.AuthorizedHttp):
        """Connection that refuses plain http, which a discovery document may name."""

        def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
            if not uri.lower().startswith("https://"):
                raise ValueError("Expected the address of the API to be https.")
            return super().request(uri, *args, **kwargs)

    # The library's default is a minute.
    http = httplib2.Http(timeout=_API_TIMEOUT_SECONDS)
    # A redirect could lead out of https.
    http.follow_redirects = False
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(
        name,
        version,
        http=HttpsOnly(credentials, http=http),
        cache_discovery=False,
        num_retries=0,
        **options,
    )


def summarize(error: BaseException) -> str:
    """Return an error without the library's text, which may contain keys."""
    kind = type(error).__name__
    status = getattr(getattr(error, "resp", None), "status", None)
    if status is not None:
        return f"{kind}: HTTP {status}"
    if isinstance(error, OSError):
        return f"{kind}: {error}"
    return kind


class MetadataError(RuntimeError):
    """Missing or invalid answer of the metadata server."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Refuse: a metadata server never redirects."""


# No proxy: only this machine's own server can answer.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def get_metadata(path: str) -> str:
    """Return the text at a path below `/computeMetadata/v1/`."""
    # In the order of Google's own clients.
    host = (
        os.environ.get("GCE_METADATA_HOST")
        or os.environ.get("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    try:
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/{path}",
            headers={"Metadata-Flavor": "Google"},
        )
        with _opener.open(request, timeout=_METADATA_TIMEOUT_SECONDS) as response:
            if response.headers.get("Metadata-Flavor") != "Google":
                raise MetadataError(
                    f"Expected the Google Cloud metadata server at {host}. Received "
                    "an answer without its header Metadata-Flavor; set "
                    "GCE_METADATA_HOST if it is elsewhere"
                )
            # One time limit for all of the body.
            deadline = time.monotonic() + _METADATA_TIMEOUT_SECONDS
            body = b""
            while chunk := response.read1(_MAX_BYTES):
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError("the answer is too long")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
        return body.decode("utf-8").strip()
    except urllib.error.HTTPError as error:
        error.close()
        raise MetadataError(
            f"The Google Cloud metadata server at {host} answered HTTP {error.code} "
            f"for {path}"
        ) from None
    except UnicodeDecodeError:
        raise MetadataError(
            f"The Google Cloud metadata server at {host} did not answer with text for "
            f"{path}"
        ) from None
    # HTTPException: not HTTP at all. ValueError: the host makes an invalid URL.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MetadataError(
            f"No Google Cloud metadata server at {host} ({reason}); is this a Google "
            "Cloud machine?"
        ) from None
