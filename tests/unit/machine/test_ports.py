"""The port ledger never leases a port twice, and leases released ports again."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Drawn
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from roost import ConfigError, PortsExhausted
from roost.machine.ports import check_port_range, lease_range, taken_ports
from roost.runtime.managers.ledgers.ports import PortLedger


def test_blocks_are_consecutive_and_do_not_overlap():
    ledger = PortLedger({"m": range(100, 200)})
    blocks = [ledger.propose("m", 5, None) for _ in range(10)]
    ports = [port for block in blocks for port in block.ports]
    assert len(set(ports)) == 50
    assert all(100 <= port < 200 for port in ports)
    assert ledger.held == 50


def test_a_block_does_not_extend_past_the_end_of_the_range():
    for seed in range(30):
        ledger = PortLedger({"m": range(100, 110)}, seed=seed)
        assert ledger.propose("m", 7, None).ports.stop <= 110


def test_every_port_of_a_range_can_be_leased_wherever_the_ledger_starts():
    for seed in range(30):
        ledger = PortLedger({"m": range(100, 110)}, seed=seed)
        assert sorted(ledger.propose("m", 1, None).start for _ in range(10)) == list(range(100, 110))
        with pytest.raises(PortsExhausted, match="10 of 10 are leased by this job, 0 are in use by others"):
            ledger.propose("m", 1, None)


def test_ports_that_others_use_are_skipped_until_no_other_is_left():
    ledger = PortLedger({"m": range(100, 103)})
    first = ledger.propose("m", 1, None)
    ledger.refuse("m", first, [first.start])
    others = [ledger.propose("m", 1, None).start, ledger.propose("m", 1, None).start]
    assert first.start not in others
    with pytest.raises(PortsExhausted, match="2 of 3 are leased by this job, 1 are in use by others"):
        ledger.propose("m", 1, None)
    assert ledger.propose("m", 1, None).start == first.start, "it is tried again next time"


def test_machines_have_separate_ports():
    ledger = PortLedger({"a": range(100, 101), "b": range(100, 101)})
    assert ledger.propose("a", 1, None).start == ledger.propose("b", 1, None).start == 100


def test_the_ports_of_a_dead_holder_are_released():
    ledger = PortLedger({"m": range(100, 120)})
    for count in (1, 3, 2):
        ledger.propose("m", count, "worker")
    ledger.propose("m", 4, None)
    ledger.propose("m", 1, "other")
    assert ledger.holders == {"worker", "other"}
    assert ledger.release_holder("worker") == 6
    assert ledger.held == 5


class Ledgers(RuleBasedStateMachine):
    """Any order of leasing, refusing and giving back."""

    leases = Drawn("leases")

    @initialize(seed=st.integers(0, 99), size=st.integers(1, 40))
    def begin(self, seed, size):
        self.ledger = PortLedger({"m": range(1000, 1000 + size)}, seed=seed)
        self.mine = {}

    @rule(target=leases, count=st.integers(1, 6), refused=st.booleans())
    def lease(self, count, refused):
        try:
            block = self.ledger.propose("m", count, None)
        except PortsExhausted:
            return None
        assert not set(block.ports) & {port for other in self.mine.values() for port in other.ports}
        if refused:
            self.ledger.refuse("m", block, [block.start])
            return None
        self.mine[block.number] = block
        return block

    @rule(block=leases)
    def release(self, block):
        # Sometimes twice: the second time it is free, or leased to another holder.
        if block is not None:
            self.mine.pop(block.number, None)
            self.ledger.release("m", block)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "mine"):
            assert self.ledger.held == sum(block.count for block in self.mine.values())


TestLedgers = Ledgers.TestCase


@given(st.integers(1, 65535), st.integers(1, 65535))
def test_there_is_always_a_range_and_it_avoids_the_kernels_if_it_can(one, other):
    low, high = sorted((one, other))
    ports = lease_range((low, high))
    assert len(ports) > 500
    assert ports.start >= 1024
    assert ports.stop <= 65536
    if low > 3000 or high < 64000:
        assert not set(ports) & set(range(low, high + 1))


@pytest.mark.parametrize("wrong", [(5,), (0, 5), (9, 3), (1, 70000), ("1", "9"), 7, (True, 9)])
def test_a_wrong_range_is_refused(wrong):
    with pytest.raises(ConfigError, match="port_range is"):
        check_port_range(wrong)


def test_a_range_may_be_a_list_as_in_yaml():
    assert check_port_range([20000, 20009]) == (20000, 20009)
    assert check_port_range(None) is None


def test_a_port_in_use_is_found_whatever_address_it_is_bound_to():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
        assert taken_ports([(port, 1) for port in ports]) == ports
    assert taken_ports([(port, 1) for port in ports]) == []
