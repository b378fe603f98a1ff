"""Google Cloud's API client and metadata server, with time limits and without leaks."""

from __future__ import annotations

from typing import Any

from keras_strategy.cluster_resolver.extras import import_extra

_API_TIMEOUT_SECONDS = 5.0


def build_service(
    name: str,
    version: str,
    credentials: Any,
    extra: str,
    user: str,
    discovery_url: str | None = None,
) -> Any:
    """Make the client of an API.

    Args:
        name: The name of the API, such as `"tpu"`.
        version: Its version, such as `"v1"`.
        credentials: Credentials, or `"default"` or `None` for the
            application's default ones.
        extra: The extra of this package that installs the client library.
        user: What needs it, for the error.
        discovery_url: Where the description of the API is, if not in the
            library.

    Raises:
        ImportError: If the client library is not installed.
    """
    discovery = import_extra("googleapiclient.discovery", extra, user)
    if credentials is None or credentials == "default":
        google_auth = import_extra("google.auth", extra, user)
        credentials, _ = google_auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(
        name,
        version,
        http=_authorized_http(credentials, extra, user),
        cache_discovery=False,
        num_retries=0,
        **options,
    )


def _authorized_http(credentials: Any, extra: str, user: str) -> Any:
    """Return a connection that sends credentials by https only."""
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
    return HttpsOnly(credentials, http=http)


def summarize(error: BaseException) -> str:
    """Return the safe part of an error.

    The library's texts contain the URL, with the API key if there is one, and the
    server's answer.
    """
    kind = type(error).__name__
    status = getattr(getattr(error, "resp", None), "status", None)
    if status is not None:
        return f"{kind}: HTTP {status}"
    if isinstance(error, OSError):
        return f"{kind}: {error}"
    return kind
