"""Google's API client, with what we ask of it: https, time limits, no leaks."""

from __future__ import annotations

from typing import Any

from keras_strategy.cluster_resolver.extras import import_extra

_TIMEOUT_SECONDS = 5.0


def build_service(
    name: str,
    version: str,
    credentials: Any,
    extra: str,
    who: str,
    discovery_url: str | None = None,
) -> Any:
    """Makes the client of an API.

    Args:
        name: The name of the API, such as `"tpu"`.
        version: Its version, such as `"v1"`.
        credentials: Credentials, or `"default"` or `None` for the
            application's default ones.
        extra: The extra of this package that brings the client library.
        who: What needs it, for the error.
        discovery_url: Where the description of the API is, if not in the
            library.

    Returns:
        The object that `googleapiclient.discovery.build` makes.

    Raises:
        ImportError: If the client library is not installed.
    """
    discovery = import_extra("googleapiclient.discovery", extra, who)
    if credentials is None or credentials == "default":
        google_auth = import_extra("google.auth", extra, who)
        credentials, _ = google_auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(
        name,
        version,
        http=_authorized_http(credentials, extra, who),
        cache_discovery=False,
        num_retries=0,
        **options,
    )


def _authorized_http(credentials: Any, extra: str, who: str) -> Any:
    """A connection that sends the credentials, and only where they may go."""
    httplib2 = import_extra("httplib2", extra, who)
    google_auth_httplib2 = import_extra("google_auth_httplib2", extra, who)

    class HttpsOnly(google_auth_httplib2.AuthorizedHttp):
        """Refuses to send credentials in the clear.

        A discovery document may name any address for its API.
        """

        def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
            if not uri.lower().startswith("https://"):
                raise ValueError("Expected the address of the API to be https.")
            return super().request(uri, *args, **kwargs)

    # The library's own default is to wait for a minute.
    http = httplib2.Http(timeout=_TIMEOUT_SECONDS)
    # A redirect could lead out of https.
    http.follow_redirects = False
    return HttpsOnly(credentials, http=http)


def summarize(error: BaseException) -> str:
    """What may be told of an error.

    The library's own texts hold the URL, which holds the API key if there is
    one, and the server's answer, whatever it is.
    """
    kind = type(error).__name__
    status = getattr(getattr(error, "resp", None), "status", None)
    if status is not None:
        return f"{kind}: HTTP {status}"
    if isinstance(error, OSError):
        return f"{kind}: {error}"
    return kind
