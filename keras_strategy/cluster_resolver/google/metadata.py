"""A client of the metadata server that every Google Cloud machine has."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request

_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 20


class MetadataError(RuntimeError):
    """The metadata server did not answer, or not as it should."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """A metadata server never redirects: what does is not one."""


# No proxy: the question is for this machine's own server, and no one else's.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def get(path: str) -> str:
    """Asks for one value.

    The server is GCE_METADATA_HOST, or else GCE_METADATA_IP, or else
    metadata.google.internal, as for Google's own clients.

    Args:
        path: The path below `/computeMetadata/v1/`.

    Returns:
        The value, a text.

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
        with _opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
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
    # HTTPException (garbage on the wire) is no OSError; ValueError is a host
    # that makes no URL.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MetadataError(
            f"No Google Cloud metadata server at {host} ({reason}); is this a Google "
            "Cloud machine?"
        ) from None


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, within the time limit as a whole and not for each piece."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    body = b""
    while piece := response.read1(_MAX_BYTES):
        body += piece
        if len(body) > _MAX_BYTES:
            raise ValueError("the answer is too long")
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return body


def get_or_none(path: str) -> str | None:
    """The same, but `None` where there is no answer."""
    try:
        return get(path)
    except MetadataError:
        return None
