"""The workers that train together, as one of them sees them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.workers.member import Member
from keras_strategy.workers.settings import is_loopback


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

    @property
    def is_local(self) -> bool:
        """Whether all workers are known to be on this machine."""
        hosts = (address.rpartition(":")[0] for address in self.addresses)
        return all(is_loopback(host.strip("[]")) for host in hosts)

    def agree(self, operation: str, value: Any) -> list[Any]:
        """What each worker says, by rank; see `workers.Member.agree`."""
        return self.member.agree(operation, value)

    def differences(self, operation: str, value: Any) -> list[Any] | None:
        """What each worker says, by rank, if they say different things.

        Args:
            operation: What this worker is doing; all must do the same.
            value: What JSON can say; it may be long.

        Returns:
            None if all say the same.
        """
        text = json.dumps(value).encode()
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        if len(set(self.agree(operation, digest))) == 1:
            return None
        return self.agree(f"{operation}: what differs", value)

    def listed(self, told: Iterable[Any]) -> str:
        """What each worker says, for a message."""
        pairs = zip(self.names, told, strict=True)
        return ", ".join(f"{name}: {what}" for name, what in pairs)
