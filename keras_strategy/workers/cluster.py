"""Cluster membership: this process's place among the workers that train together."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.workers.member import CoordinatorClient
from keras_strategy.workers.settings import all_local

# Number of parts into which a list is divided to find a difference, and number of
# workers that a message names.
_PARTS, _MAX_NAMED = 64, 8


@dataclass(frozen=True, eq=False)
class Cluster:
    """The workers of a cluster, all of which train.

    Attributes:
        rank: This worker's rank. Worker 0 is the chief.
        names: The workers' names, by rank: "chief", "worker 0".
        addresses: "host:port" of each, by rank; empty where it is not known.
        member: This worker's client of the coordinator.
        options: The user's communication options.
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    client: CoordinatorClient
    options: CommunicationOptions

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.names)

    @property
    def is_chief(self) -> bool:
        """True on the worker that writes files."""
        return self.rank == 0

    @functools.cached_property
    def is_local(self) -> bool:
        """True if all workers are known to be on this machine."""
        return all_local(self.addresses)

    def exchange(
        self, operation: str, value: Any, seconds: float | None = None
    ) -> list[Any]:
        """Exchange a value with all workers; see `CoordinatorClient.agree`."""
        return self.client.exchange(operation, value, seconds)

    def start_exchange(self, operation: str, value: Any) -> Callable[[], list[Any]]:
        """Start an exchange; see `CoordinatorClient.tell`."""
        return self.client.start_exchange(operation, value)

    def values_if_different(self, operation: str, value: Any) -> list[Any] | None:
        """Return the workers' values by rank if they differ, else None.

        The value may be long: only its digest is exchanged unless the digests differ.
        """
        if len(set(self.exchange(operation, _digest(value)))) == 1:
            return None
        return self.exchange(f"{operation}: what differs", value)

    def first_difference(
        self, operation: str, items: Sequence[Any], extra: Any = None
    ) -> tuple[list[Any], tuple[int, list[Any]] | None]:
        """Return the first item of a list that is not the same on all workers.

        However long the list is, the messages are short: a digest of it, and where
        those differ the digests of its parts, until one item is left.

        Args:
            operation: The same name on all workers.
            items: JSON values.
            extra: A value to exchange with the first digest.

        Returns:
            The workers' `extra` values by rank; and the index of the item with the
            workers' items there (None where a list is shorter), or None if all are the
            same.
        """
        replies = self.exchange(operation, [_digest(items), len(items), extra])
        extras = [value for *_, value in replies]
        if all(digest == replies[0][0] for digest, *_ in replies):
            return extras, None
        low, high = 0, max(count for _, count, _ in replies)
        while high - low > 1:
            step = -(-(high - low) // _PARTS)
            starts = range(low, high, step)
            digests = [_digest(items[start : start + step]) for start in starts]
            parts = self.exchange(f"{operation}: what differs", digests)
            differ = (len(set(part)) > 1 for part in zip(*parts, strict=True))
            # The whole differs, so at least one part does.
            low = starts[next(n for n, different in enumerate(differ) if different)]
            high = min(low + step, high)
        item = items[low] if low < len(items) else None
        return extras, (low, self.exchange(f"{operation}: what differs", item))

    def format_by_value(self, values: Iterable[Any]) -> str:
        """Format the workers' values, with the names of those that have the same."""
        groups: dict[str, list[str]] = {}
        for name, value in zip(self.names, values, strict=True):
            groups.setdefault(str(value), []).append(name)
        return "; ".join(f"{_join_names(n)}: {value}" for value, n in groups.items())

    def format_by_worker(self, values: Iterable[Any]) -> str:
        """Format the workers' values, each with the worker's name."""
        pairs = zip(self.names, values, strict=True)
        return ", ".join(f"{name}: {value}" for name, value in pairs)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _join_names(names: Sequence[str]) -> str:
    omitted = len(names) - _MAX_NAMED
    shown = names if omitted < 2 else [*names[:_MAX_NAMED], f"{omitted} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
