"""Short timeouts, for clients that have taken their time to join."""

from keras_strategy.cluster.client import CoordinatorClient


def wait_for_others(client: CoordinatorClient, seconds: float) -> None:
    """Set how long a client waits in an operation.

    Not from the start: on a busy machine workers arrive seconds after each other.
    """
    client.timeout_seconds = seconds
    watchdog = client._watchdog
    watchdog._timeout, watchdog.interval = seconds, min(1.0, seconds / 4)
