"""A short patience, for clients that have taken their time to join."""

from keras_strategy.cluster import CoordinatorClient


def wait_for_others(client: CoordinatorClient, seconds: float) -> None:
    """Has a client wait for so long in an operation, from now on.

    Not from the start: on a busy machine workers arrive seconds after each other.
    """
    client.timeout_seconds = seconds
    watchdog = client._connection._watchdog
    watchdog._timeout, watchdog.interval = seconds, min(1.0, seconds / 4)
