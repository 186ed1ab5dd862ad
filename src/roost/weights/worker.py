"""`WeightWorker`: a worker whose weights go to others, or come from them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from roost.comm.worker import Worker
from roost.errors import ClusterError, ConfigError
from roost.weights.adapters import as_weights
from roost.weights.layout import Held
from roost.weights.limits import RELEASE_SECONDS
from roost.weights.versions import NO_VERSION, Versions

if TYPE_CHECKING:
    from roost.weights.member import Member


class WeightWorker(Worker):
    """Says where its weights lie: `offer` in a source, `accept` in a target, and nothing else.

    Both return a torch module, a dict of tensors or arrays by name, or another adapter. They are called in a thread of
    their own while other methods run.
    """

    def offer(self) -> Any:
        """Return the weights that others get. They must not change during an update."""
        raise ConfigError(f"{self.address} has no method offer(), and is the source of a link")

    def accept(self) -> Any:
        """Return the weights that an update overwrites."""
        raise ConfigError(f"{self.address} has no method accept(), and is the target of a link")

    def weights_changing(self, version: int) -> AbstractContextManager[Any]:
        """Return what surrounds the moment in which weights change, such as a pause of an engine."""
        del version
        return contextlib.nullcontext()

    @property
    def weights_version(self) -> int:
        """The version that this worker's weights have, wholly; -1 if no update has come, or one was broken off."""
        versions: Versions | None = vars(self).get("_roost_versions")
        return versions.whole if versions is not None else NO_VERSION

    def let_go_of_weights(self, timeout: float = RELEASE_SECONDS) -> None:
        """Free the memory that links took for updates, such as before its device is lent to another process.

        The next update takes it again; one that is under way is broken off.
        """
        member: Member | None = vars(self).get("_roost_weights")
        if member is not None:
            member.let_go(timeout)

    def report_weights(self, role: str) -> list[Held]:
        """Say which part of which tensor this worker holds; a link asks."""
        return as_weights(getattr(self, role)(), role).held()

    def open_weights(self, link: str, in_place: bool, may_share: bool) -> int:
        """Take part in a link, which asks; returns the version of the weights."""
        try:
            from roost.weights.member import Member  # a worker that is in no link pays nothing

            member: Member | None = vars(self).get("_roost_weights")
            if member is None:
                member = vars(self).setdefault("_roost_weights", Member(self))
            member.join(link, in_place=in_place, may_share=may_share)
        except OSError as error:
            # It may have no descriptor left, not even to import a module.
            hint = "if it has too many files open, raise the limit: ulimit -n"
            raise ClusterError(f"{self.address} cannot take part in {link}: {error.strerror}", hint=hint) from error
        return member.versions.whole
