"""Finding out which accelerator a bundle is, and the order of bundles that is the same every day."""

from __future__ import annotations

from typing import Any

import ray

from roost.runtime.nodes.order import AddressKey, address_key

GpuKey = tuple[int, int, str]


@ray.remote(num_gpus=1, num_cpus=0)
class InfoActor:
    """A probe as the documents have it: an actor in a bundle, which says where it is. It costs a process a bundle.

    `create_placement_groups` finds out the same with one process a node.
    """

    def get_ip_and_gpu_id(self) -> tuple[str, str]:
        """The address of the node, and the id of the accelerator that the bundle is."""
        # The public way to both: the address that Ray knows the node by, and the id of the first accelerator.
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, str(ray.get_gpu_ids()[0])


def sort_key(x: tuple[Any, ...]) -> tuple[AddressKey, str, GpuKey]:
    """The key to sort `(index, node, gpu_id)` by: the node's address as a number, then the id as a number.

    A name counts as what it resolves to, and where it does not, by its characters. Nodes that share an address are
    told apart by a fourth entry, such as Ray's id for the node.

    >>> found = [(0, "10.0.0.10", "0"), (1, "10.0.0.9", "10"), (2, "10.0.0.9", "9"), (3, "fe80::1", 0)]
    >>> [index for index, _, _ in sorted(found, key=sort_key)]
    [2, 1, 0, 3]
    """
    _, node, gpu_id, *which = x
    return address_key(str(node)), str(which[0]) if which else "", _gpu_key(gpu_id)


def _gpu_key(gpu_id: object) -> GpuKey:
    text = str(gpu_id)
    return (0, int(text), "") if text.isascii() and text.isdigit() else (1, 0, text)
