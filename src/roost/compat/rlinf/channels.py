"""RLinf's channels: any key, and the words of its `create`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

from roost.comm.channels import channel
from roost.comm.channels.channel import DEFAULT_KEY
from roost.comm.channels.channel import ChannelWorker as HomeWorker
from roost.comm.channels.client import Client, LocalClient
from roost.comm.channels.home import ChannelSettings
from roost.comm.worker import Worker
from roost.compat.rlinf.workers import Worker as RLinfWorker
from roost.compat.rlinf.workers import WorkerGroup

_SHOWN = 100
"""How many items a channel shows of itself."""


class ChannelWorker(HomeWorker, RLinfWorker):  # type: ignore[misc]
    """The process that a channel lives in; the memory of its items has no limit, as in RLinf."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__(maxsize, max_bytes=0)


class Channel(channel.Channel):
    """A named queue, with RLinf's arguments."""

    def __init__(
        self,
        name: str = "",
        settings: ChannelSettings | None = None,
        identity: Any = None,
        local: LocalClient | None = None,
    ) -> None:
        # RLinf makes one first, and says later what it is.
        if settings is not None:
            super().__init__(name, settings, identity, local)

    def _initialize(self, channel_name: str, *_: Any, **__: Any) -> None:
        """Become the channel of that name, whose home the caller launched."""
        vars(self).update(vars(Channel.connect(channel_name)))

    @classmethod
    def create(  # type: ignore[override]
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
    ) -> Channel:
        """Start a channel, of which only `maxsize` limits the memory."""
        del disable_distributed_log
        return cast(Channel, super().create(name, maxsize, distributed, node_rank, local, max_bytes=0))

    @classmethod
    def connect(cls, name: str, current_worker: Worker | None = None, *, timeout: float | None = None) -> Channel:
        return cast(Channel, super().connect(name, current_worker, timeout=timeout))

    @property
    def is_local(self) -> bool:
        return self._local is not None

    @property
    def _distributed(self) -> bool:
        return len(self._settings.nodes) > 1

    @property
    def _channel_actors_by_rank(self) -> dict[int, Any]:
        return dict(enumerate(WorkerGroup.attach(self._name).actor_handles))

    def get_batch(self, target_weight: float = 0, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> Any:  # type: ignore[override]
        return super().get_batch(target_weight, key, async_op)

    def __str__(self) -> str:
        # RLinf shows the items, too.
        return f"{super().__str__()}: {self.peek(_SHOWN)}"

    def _place(self, key: Hashable) -> tuple[Client, bytes]:
        return super()._place(key if isinstance(key, str | int | float) else repr(key))
