"""Client of the metadata server that every Google Cloud machine has."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request

_METADATA_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 20


class MetadataError(RuntimeError):
    """Missing or invalid answer of the metadata server."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Refuse: a metadata server never redirects."""


# No proxy: only this machine's own server can answer.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def get_metadata(path: str) -> str:
    """Return the text at a path below `/computeMetadata/v1/`.

    The server is GCE_METADATA_HOST, or else GCE_METADATA_IP, or else
    metadata.google.internal, as for Google's own clients.

    Raises:
        MetadataError: If there is no such server in time, or no such value.
    """
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
            body = _read(response)
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


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the body, with one time limit for all of it."""
    deadline = time.monotonic() + _METADATA_TIMEOUT_SECONDS
    body = b""
    while chunk := response.read1(_MAX_BYTES):
        body += chunk
        if len(body) > _MAX_BYTES:
            raise ValueError("the answer is too long")
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return body


def get_metadata_or_none(path: str) -> str | None:
    """Return the same, or `None` where there is no answer."""
    try:
        return get_metadata(path)
    except MetadataError:
        return None
