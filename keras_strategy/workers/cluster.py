"""The workers that train together, as one of them sees them."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.workers.member import Member
from keras_strategy.workers.settings import all_here

# Into how many parts a list is split to find where it differs, and how many workers a
# message names.
_PARTS, _NAMED = 64, 8


@dataclass(frozen=True, eq=False)
class Cluster:
    """The workers of a cluster, all of which train.

    Attributes:
        rank: This worker's number, from 0. Worker 0 is the chief.
        names: What each worker is called, by rank: "chief", "worker 0".
        addresses: "host:port" of each, by rank; empty where it is not known.
        member: This worker's connection to the others.
        options: How values shall travel.
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    member: Member
    options: CommunicationOptions

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.names)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes."""
        return self.rank == 0

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether all workers are known to be on this machine."""
        return all_here(self.addresses)

    def agree(
        self, operation: str, value: Any, seconds: float | None = None
    ) -> list[Any]:
        """What each worker says, by rank; see `workers.Member.agree`."""
        if seconds is None:
            return self.member.agree(operation, value)
        return self.member.agree(operation, value, seconds)

    def tell(self, operation: str, value: Any) -> Callable[[], list[Any]]:
        """A function that gives what each worker says; see `workers.Member.tell`."""
        return self.member.tell(operation, value)

    def differences(self, operation: str, value: Any) -> list[Any] | None:
        """What each worker says, by rank, if they say different things.

        Args:
            operation: What this worker is doing; all must do the same.
            value: What JSON can say; it may be long.

        Returns:
            None if all say the same.
        """
        if len(set(self.agree(operation, _digest(value)))) == 1:
            return None
        return self.agree(f"{operation}: what differs", value)

    def first_difference(
        self, operation: str, items: Sequence[Any], more: Any = None
    ) -> tuple[list[Any], tuple[int, list[Any]] | None]:
        """The first of a list of items that is not the same on all workers.

        What travels is short however long the list is: a digest of it, and where those
        differ the digests of its parts, until one item is left.

        Args:
            operation: What this worker is doing; all must do the same.
            items: What JSON can say.
            more: A value to exchange with the first digest.

        Returns:
            What each worker says as `more`, by rank; and the number of the item with
            what each worker has there, None where its list is shorter; or None if all
            items are the same.
        """
        told = self.agree(operation, [_digest(items), len(items), more])
        others = [other for *_, other in told]
        if all(digest == told[0][0] for digest, *_ in told):
            return others, None
        low, high = 0, max(count for _, count, _ in told)
        while high - low > 1:
            step = -(-(high - low) // _PARTS)
            starts = range(low, high, step)
            mine = [_digest(items[start : start + step]) for start in starts]
            parts = self.agree(f"{operation}: what differs", mine)
            differ = (len(set(part)) > 1 for part in zip(*parts, strict=True))
            # Digests that differ are of lists with a part that does.
            low = starts[next(n for n, different in enumerate(differ) if different)]
            high = min(low + step, high)
        item = items[low] if low < len(items) else None
        return others, (low, self.agree(f"{operation}: what differs", item))

    def grouped(self, told: Iterable[Any]) -> str:
        """What each worker says, for a message; those that say the same are together.

        Of many workers it names a few.
        """
        groups: dict[str, list[str]] = {}
        for name, what in zip(self.names, told, strict=True):
            groups.setdefault(str(what), []).append(name)
        return "; ".join(f"{_few(who)}: {what}" for what, who in groups.items())

    def listed(self, told: Iterable[Any]) -> str:
        """What each worker says, for a message."""
        pairs = zip(self.names, told, strict=True)
        return ", ".join(f"{name}: {what}" for name, what in pairs)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    shown = names if more < 2 else [*names[:_NAMED], f"{more} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
