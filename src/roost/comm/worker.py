"""`Worker`: the class that users derive from. It knows who it is, even in a plain process without Ray.

class Actor(Worker):
    def train(self, step):
        self.log_info(f"step {step} on rank {self.rank} of {self.world_size}")
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

from roost.comm.mailbox import addresses_of, source_of
from roost.comm.options import CollectiveGroupOptions, check_options
from roost.runtime.process.identity import WorkerIdentity, alone, current_identity
from roost.runtime.worker import PlacedWorker, current_worker, fact, process_fact

if TYPE_CHECKING:
    from roost.comm.channels.channel import Channel
    from roost.comm.devices import DeviceLock
    from roost.comm.messages import Messages
    from roost.comm.wire.loop import Handle


class TalkingWorker:
    """A worker's means of talking to others: messages, tensors, channels and collectives."""

    _roost_is_base = True
    _identity: WorkerIdentity

    @process_fact
    def torch_device_type(self) -> str:
        """Torch's name for the accelerators that it sees here: `cuda`, `npu`, `xpu`; `cpu` if it sees none."""
        from roost.comm.devices import torch_device_type  # torch loads when it is used

        return torch_device_type((current_identity() or alone("worker")).placement)

    @process_fact
    def torch_platform(self) -> Any:
        """The module of torch for them, such as `torch.cuda`: `Worker.torch_platform.synchronize()`."""
        return getattr(importlib.import_module("torch"), self.torch_device_type)

    @fact
    def device_lock(self) -> DeviceLock:
        """A lock for workers that share accelerators: `with self.device_lock:` is for one of them at a time."""
        made: DeviceLock | None = vars(self).get("_roost_device_lock")
        if made is None:
            from roost.comm.devices import make_device_lock  # few workers use it

            made = vars(self).setdefault("_roost_device_lock", make_device_lock(self._identity.placement))
        return made

    def send(
        self,
        object: Any,  # noqa: A002 - the name in the contract
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        piggyback_payload: Any = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Send any picklable object to a worker of the job, or to several ranks of a group.

        Arrays and tensors, nested in anything, travel as raw buffers. What was sent may be changed when this returns,
        or with `async_op` when the handle is done. `tag` keeps conversations apart; `piggyback_payload` travels along.
        """
        check_options(options)
        messages, peers = self._roost_messages, addresses_of(dst_group_name, dst_rank)
        sent = [messages.send(object, to, tag, piggyback_payload) for to in peers]
        return messages.ended(sent, async_op, timeout)

    def recv(
        self,
        src_group_name: str,
        src_rank: int | str | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive an object: the k-th receive from a worker gets the k-th that it sent under this tag.

        Returns `(object, payload)` if a payload was sent along. `recv(ANY)` and `recv("rollout", ANY)` receive from any
        worker, or any of a group, and return `(object, address of the sender)`.
        """
        check_options(options)
        return self._roost_messages.recv(source_of(src_group_name, src_rank), tag, None, async_op, timeout)

    def send_tensor(
        self,
        tensor: Any,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Send the content of a tensor or array, for `recv_tensor` at the other end: quicker than `send` if large."""
        check_options(options)
        messages, peers = self._roost_messages, addresses_of(dst_group_name, dst_rank)
        sent = [messages.send_tensor(tensor, to, tag) for to in peers]
        return messages.ended(sent, async_op, timeout)

    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: int | str | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive into a tensor or array that has the size of the one that was sent with `send_tensor`."""
        check_options(options)
        return self._roost_messages.recv(source_of(src_group_name, src_rank), tag, tensor, async_op, timeout)

    def send_to(
        self,
        rows: Any,
        dst_group_name: str,
        *,
        world_size: int | None = None,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> None:
        """Send this rank's rows of a batch to a group whose ranks share the batch evenly and call `recv_from`.

        Every rank of this group calls it, with as many rows as it has: a list, an array, a tensor, or a dict of these.
        The order of the rows stays. `world_size` is that of the other group, by default as it was launched.
        """
        from roost.comm.rows import send_to  # likewise

        send_to(self._roost_messages, self._identity, rows, dst_group_name, world_size, tag, timeout)

    def recv_from(
        self,
        src_group_name: str,
        *,
        world_size: int | None = None,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive this rank's rows of a batch that the ranks of a group send with `send_to`.

        Every rank of this group calls it. The k-th call gets rows of the k-th batch; a call that fails takes nothing.
        """
        from roost.comm.rows import recv_from  # likewise

        own = self._identity.address
        return recv_from(self._roost_messages, own, src_group_name, world_size, tag, timeout)

    def create_channel(
        self,
        channel_name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        max_bytes: int | None = None,
    ) -> Channel:
        """Create a channel, as `Channel.create` does; in a process without Ray it is a local one."""
        from roost.comm.channels.channel import MAX_BYTES, Channel  # a worker that does not communicate pays nothing
        from roost.comm.process import job_context

        is_local = local or job_context() is None
        limit = MAX_BYTES if max_bytes is None else max_bytes
        return Channel.create(channel_name, maxsize, distributed and not is_local, node_rank, is_local, max_bytes=limit)

    def connect_channel(self, channel_name: str, *, timeout: float | None = None) -> Channel:
        """Return a channel that exists, as `Channel.connect` does."""
        from roost.comm.channels.channel import Channel  # likewise

        return Channel.connect(channel_name, cast("Worker", self), timeout=timeout)

    def broadcast(
        self,
        object: Any = None,  # noqa: A002 - likewise
        groups: Sequence[tuple[str, int | Sequence[int]]] = (),
        src: tuple[str, int] | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send an object from one worker to all members of several groups; every member calls it and gets the object.

        `groups` is `[("actor", [0, 1]), ("rollout", 0)]`; `src` is the worker that has the object, by default the first
        that is listed.
        """
        from roost.comm.collectives import broadcast  # likewise

        return broadcast(self._roost_messages, self._identity.address, object, groups, src, async_op, options, timeout)

    def collective(
        self,
        group_name: str,
        ranks: Sequence[int] | None = None,
        backend: str | None = None,
        *,
        name: str | None = None,
        options: CollectiveGroupOptions | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return a process group of `torch.distributed` over workers of a group, all of which call this.

        Use it with torch's own functions: `dist.all_reduce(tensor, group=worker.collective("actor"))`. The backend is
        NCCL if torch sees a GPU here, else Gloo. Each call makes a group of its own; `name` tells those apart that are
        not asked for in the same order everywhere. CallTimedOut names the workers that did not come.
        """
        from roost.comm.collectives import make_process_group  # likewise
        from roost.runtime.cluster import Cluster

        own = self._identity.address
        return make_process_group(Cluster().context, own, group_name, ranks, backend, name, options, timeout)

    @property
    def _roost_messages(self) -> Messages:
        made: Messages | None = vars(self).get("_roost_made")
        if made is None or made.endpoint.is_closed:
            from roost.comm.process import process_messages  # a worker that does not communicate pays nothing

            made = process_messages(self._identity)
            object.__setattr__(self, "_roost_made", made)
        return made


class Worker(PlacedWorker, TalkingWorker):
    """One process of a group.

    Derive from it, call `super().__init__()`, and launch a group with `create_group(…).launch(cluster)`. A worker that
    you construct yourself in a plain process is rank 0 of a group of one.
    """

    _roost_is_base = True

    @process_fact
    def current_worker(self) -> Worker | None:
        """The worker of this process, for code that does not get it passed; None where there is none."""
        found: Worker | None = current_worker()
        return found
