"""Where the processes of a job can be reached by each other, as plain state."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class EndpointLedger:
    """By address: the newest process of that name, and where it listens. `secret` is what all of them know."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    listings: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add(self, address: str, instance: str, listing: Any) -> None:
        """Add a process; it replaces an earlier one of the same name."""
        self.listings[address] = instance, listing

    def find(self, address: str, but_not: str) -> Any | None:
        """Return where a process listens, unless it is the one that is known to be gone."""
        instance, listing = self.listings.get(address, ("", None))
        return None if instance == but_not else listing
