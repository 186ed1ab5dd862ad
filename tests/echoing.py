"""A member of a job in a process of its own, which few descriptors are left for and which echoes messages, for tests.

It prints where it listens, and reads where the one to talk to does.
"""

from __future__ import annotations

import base64
import os
import pickle
import resource
import sys

from roost.comm.messages import Messages
from roost.comm.process import PlainDirectory
from roost.comm.wire.connection import PeerInfo
from roost.comm.wire.endpoint import Endpoint, Listing, own_instance


def make_member(address: str, node: int, host: str | None = "127.0.0.1") -> tuple[Messages, PlainDirectory]:
    own = PeerInfo(address=address, instance=own_instance(), node=f"node {node}", node_rank=node)
    directory = PlainDirectory()
    return Messages(Endpoint(own, b"secret", directory, host)), directory


def write(listing: Listing) -> str:
    return base64.b64encode(pickle.dumps(listing)).decode()


def read(line: str) -> Listing:
    found: Listing = pickle.loads(base64.b64decode(line))  # noqa: S301 - from the other process of the test
    return found


def main() -> None:
    files = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    messages, _ = make_member("b:0", 0)
    print(write(messages.endpoint._listing), flush=True)
    while True:
        thing, source = messages.wait_for_next("*", None, None, 120)
        if thing == "end":
            break
        answer = len(os.listdir("/proc/self/fd")) if thing == "files" else thing
        # Whoever asks may be gone before it is answered.
        messages.send(answer, source)
    messages.endpoint.close()


if __name__ == "__main__":
    main()
