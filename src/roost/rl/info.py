"""Which accelerator a bundle is, and an order of bundles that is the same in every run."""

from __future__ import annotations

from typing import Any

import ray

from roost.runtime.nodes.order import AddressKey, address_key


@ray.remote(num_gpus=1, num_cpus=0)
class InfoActor:
    """The documents' probe, one process per bundle; `create_placement_groups` needs only one per node."""

    def get_ip_and_gpu_id(self) -> tuple[str, str]:
        """Return the node's address, as Ray knows it, and the id of the bundle's accelerator."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, str(ray.get_gpu_ids()[0])


def sort_key(x: tuple[Any, ...]) -> tuple[AddressKey, str, tuple[int, int, str]]:
    """Return the key to sort `(index, node, gpu_id)` by: the node's address as a number, then the id as a number.

    A host name sorts by the address that it resolves to, or else by its characters. A fourth entry, such as Ray's id
    for the node, separates nodes that share an address.

    >>> found = [(0, "10.0.0.10", "0"), (1, "10.0.0.9", "10"), (2, "10.0.0.9", "9"), (3, "fe80::1", 0)]
    >>> [index for index, _, _ in sorted(found, key=sort_key)]
    [2, 1, 0, 3]
    """
    _, node, gpu_id, *which = x
    text = str(gpu_id)
    gpu_key = (0, int(text), "") if text.isascii() and text.isdigit() else (1, 0, text)
    return address_key(str(node)), str(which[0]) if which else "", gpu_key
