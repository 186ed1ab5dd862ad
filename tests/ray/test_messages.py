"""Workers send each other messages: what arrives, in which order, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from pair_workers import Lender
from roost import (
    ANY,
    CallTimedOut,
    Cluster,
    ClusterError,
    ConfigError,
    NodePlacementStrategy,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
)
from shared_memory import shared_memory
from talkers import Talker
from waiting import is_gone, stop, wait_until


@pytest.fixture
def talkers(keep, shared_cluster: Cluster):
    """Two workers on one node and one on another."""
    return keep(
        "talkers",
        lambda: Talker.create_group().launch(
            shared_cluster, NodePlacementStrategy([0, 0, 1]), name="talkers", restarts=5
        ),
    )


def test_objects_arrive_as_they_were_sent_on_the_same_node_and_on_another(talkers):
    things = [
        None,
        {"b": [1, (2, 3)], "a": {"x"}},
        b"x" * 300_000,
        np.arange(100_000).reshape(100, 1000)[:, ::2],
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        [np.ones(50_000, np.float16), {"deep": (np.arange(9),)}],
    ]
    for peer in (1, 2):
        echo = talkers[peer].echo("talkers", 0, len(things))
        got = talkers[0].round_trip(things, "talkers", peer).wait(60)[0]
        echo.wait(60)
        assert list(got[1]) == ["b", "a"]
        for sent, came in zip(things, got, strict=True):
            assert type(came) is type(sent)
            np.testing.assert_equal(came, sent)
            if isinstance(sent, np.ndarray):
                assert (came.dtype, came.shape) == (sent.dtype, sent.shape)


@pytest.mark.parametrize("peer", [1, 2])
def test_large_arrays_can_be_written_to_and_memory_is_used_again(talkers, peer):
    for value in range(4):
        heard = talkers[0].hear_array("talkers", peer)
        talkers[peer].say_array(20 << 20, value, "talkers", 0).wait(30)
        assert heard.wait(30) == [(value + 1, value, True)]


@pytest.mark.parametrize("peer", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 70_000, 9_999_999])
def test_a_tensor_arrives_in_the_buffer_whichever_side_is_first(talkers, peer, size):
    want = {7} if size else set()
    heard = talkers[0].hear_tensor(size, "talkers", peer)
    talkers[peer].say_tensor(size, 7, "talkers", 0).wait(30)
    assert heard.wait(30) == [want]
    said = talkers[peer].say_tensor(size, 7, "talkers", 0)
    assert talkers[0].hear_tensor(size, "talkers", peer).wait(30) == [want]
    said.wait(30)


def test_tensors_and_objects_have_one_order(talkers):
    talkers[1].interleave("talkers", 0).wait(60)
    assert talkers[0].hear_interleaved("talkers", 1).wait(60) == [["first", [0, 1, 2, 3], "last"]]


def test_tags_keep_conversations_apart_and_a_payload_travels_along(talkers):
    talkers[1].say("plain", "talkers", 0).wait(60)
    talkers[1].say("tagged", "talkers", 0, tag="t", piggyback_payload={"step": 3}).wait(60)
    assert talkers[0].hear("talkers", 1, tag="t", timeout=60).wait(60) == [("tagged", {"step": 3})]
    assert talkers[0].hear("talkers", 1, timeout=60).wait(60) == ["plain"]


def test_a_receive_from_any_worker_says_who_it_was(talkers):
    talkers[2].say("from 2", "talkers", 0).wait(60)
    assert talkers[0].hear(ANY, timeout=60).wait(60) == [("from 2", "talkers:2")]
    talkers[1].say("from 1", "talkers", [0, 2]).wait(60)
    assert talkers[0].hear("talkers", ANY, timeout=60).wait(60) == [("from 1", "talkers:1")]
    assert talkers[2].hear("talkers", 1, timeout=60).wait(60) == ["from 1"]


def test_a_worker_can_send_to_itself(talkers):
    talkers[0].say([1, 2], "talkers", 0).wait(60)
    assert talkers[0].hear("talkers", 0, timeout=60).wait(60) == [[1, 2]]


def test_two_threads_and_two_event_loops_use_one_worker(talkers):
    heard = talkers[0].hear_in_threads("talkers", 50)
    for number in range(200):
        talkers[1 + number % 2].say(number, "talkers", 0)
    assert heard.wait(30) == [list(range(200))]


def test_what_does_not_fit_is_an_error_that_says_so_and_the_next_message_is_fine(talkers):
    talkers[1].say_tensor(10, 1, "talkers", 0).wait(60)
    with pytest.raises(ConfigError, match=r"talkers:1 sent a tensor of \(10,\) uint8, 10 bytes"):
        talkers[0].hear_tensor(11, "talkers", 1).wait(60)
    talkers[1].say_tensor(10, 1, "talkers", 0).wait(60)
    with pytest.raises(ConfigError, match="sent with send_tensor, and this is recv"):
        talkers[0].hear("talkers", 1, timeout=60).wait(60)
    with pytest.raises(ConfigError, match="cannot be sent"):
        talkers[1].say((lambda: (yield))(), "talkers", 0).wait(60)
    talkers[1].say_unloadable("talkers", 0).wait(60)
    with pytest.raises(WorkerFailed, match="from talkers:1 cannot be unpickled: ArithmeticError: boom"):
        talkers[0].hear("talkers", 1, timeout=60).wait(60)
    talkers[1].say("fine", "talkers", 0).wait(60)
    assert talkers[0].hear("talkers", 1, timeout=60).wait(60) == ["fine"]


def test_a_receive_that_timed_out_names_the_other_and_takes_nothing(talkers):
    with pytest.raises(CallTimedOut, match=r"talkers:0 has got no message from talkers:2 after 0\.2 s"):
        talkers[0].hear("talkers", 2, timeout=0.2).wait(60)
    talkers[2].say("later", "talkers", 0).wait(60)
    assert talkers[0].hear("talkers", 2, timeout=60).wait(60) == ["later"]


def test_a_thousand_receives_take_no_thread_and_little_memory(talkers):
    talkers[0].hear_many("talkers", 1, 0).wait(60)
    talkers[1].say("warm", "talkers", 0).wait(60)
    talkers[0].hear("talkers", 1, timeout=60).wait(60)
    threads, memory = talkers[0].post_receives("talkers", 1, 1000).wait(60)[0]
    assert threads <= 1
    assert memory < 20 * 2**20
    talkers[0].restart(0, force=True)


def test_a_sender_that_nobody_hears_waits_and_its_peer_does_not_grow(talkers):
    before = talkers[2].memory().wait(60)[0]
    talkers[2].hear("talkers", 2, timeout=0).outcomes()
    took = talkers[0].flood(4 << 20, 100, "talkers", 2).wait(30)[0]
    assert took < 60
    assert talkers[2].memory().wait(60)[0] - before < 256 * 2**20
    for rank in (0, 2):
        talkers.restart(rank, force=True)


def test_death_is_an_answer_and_a_restarted_worker_talks_again(talkers):
    talkers[1].say("hello", "talkers", 0).wait(60)
    assert talkers[0].hear("talkers", 1, timeout=60).wait(60) == ["hello"]
    # For the process that is killed, and for no other.
    talkers[0].say("for the dead", "talkers", 1).wait(60)
    waiting = talkers[0].hear("talkers", 1, timeout=60)
    other = talkers[2].hear("talkers", 0, timeout=60)
    os.kill(talkers[1].pid().wait(60)[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="talkers:1 on node 0"):
        waiting.wait(60)
    assert time.monotonic() - began < 30
    wait_until(lambda: talkers.alive == [0, 1, 2], "it is restarted")
    talkers[0].say("unharmed", "talkers", 2).wait(60)
    assert other.wait(60) == ["unharmed"]
    heard = talkers[1].hear("talkers", 0, timeout=60)
    talkers[0].say("for the living", "talkers", 1).wait(60)
    assert heard.wait(60) == ["for the living"]
    talkers[1].say("back", "talkers", 0).wait(60)
    assert talkers[0].hear("talkers", 1, timeout=60).wait(60) == ["back"]


def test_a_peer_that_is_stopped_holds_up_no_deadline(talkers):
    pid = talkers[1].pid().wait(60)[0]
    stop(pid)
    try:
        with pytest.raises(CallTimedOut, match="talkers:0 has got no message from talkers:1"):
            talkers[0].hear("talkers", 1, timeout=0.5).wait(60)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_worker_that_is_dead_for_good_is_an_error(shared_cluster, talkers):
    with Talker.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="short") as short:
        short.say("hello", "talkers", 0).wait(60)
        assert talkers[0].hear("short", 0, timeout=60).wait(60) == ["hello"]
    with pytest.raises(WorkerDied, match="short:0"):
        talkers[0].hear("short", 0, timeout=60).wait(60)
    with pytest.raises(WorkerDied, match="short:0"):
        talkers[0].say(1, "short", 0, timeout=60).wait(60)


def test_a_broadcast_reaches_every_member_and_a_dead_one_is_named(talkers):
    groups = [("talkers", [0, 1, 2])]
    results = [talkers[0].all_have({"w": np.arange(3)}, groups, timeout=60)]
    results += [talkers[rank].all_have(None, groups, timeout=60) for rank in (1, 2)]
    for result in results:
        np.testing.assert_equal(result.wait(60), [{"w": np.arange(3)}])
    # In another order, with a source that is not the first.
    one = talkers[0].all_have(None, [("talkers", [2, 0])], ("talkers", 2), timeout=60)
    two = talkers[2].all_have("x", [("talkers", 0), ("talkers", 2)], ("talkers", 2), timeout=60)
    assert (one.wait(60), two.wait(60)) == (["x"], ["x"])
    with pytest.raises(ConfigError, match="talkers:0, this worker, is not one of the members"):
        talkers[0].all_have(1, [("talkers", [1, 2])]).wait(60)
    waiting = talkers[0].all_have(None, groups, ("talkers", 1), timeout=60)
    os.kill(talkers[1].pid().wait(60)[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="talkers:1 on node 0"):
        waiting.wait(60)
    wait_until(lambda: talkers.alive == [0, 1, 2], "it is restarted")


def test_workers_get_process_groups_of_torch_and_missing_ones_are_named(talkers):
    pytest.importorskip("torch")
    assert talkers.reduce(name="all").wait(120) == [[3.0, 3.0]] * 3
    assert talkers.on(0, 2).reduce([0, 2], name="two").wait(120) == [[2.0, 2.0]] * 2
    with pytest.raises(CallTimedOut, match=r"talkers:0 waits in a collective of 3 workers for talkers:1 and talkers:2"):
        talkers[0].reduce(timeout=1).wait(120)


def test_a_group_that_is_closed_with_messages_on_their_way_leaves_nothing(shared_cluster):
    group = Talker.create_group().launch(shared_cluster, NodePlacementStrategy([0, 0]), name="busy")
    pids = group.pid().wait(60)
    # The first fills what may be on its way, and waits; the second receives none of it.
    flood = group[0].say_many(4 << 20, 1000, "busy", 1)
    waiting = group[1].hear("busy", 0, tag="never")
    time.sleep(0.5)
    group.close()
    for result in (flood, waiting):
        with pytest.raises((WorkerDied, ClusterError)):
            result.wait(60)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), "its process has ended")
    assert not [path for path in shared_memory() if "roost" in path.name]


def launch_lenders(cluster: Cluster, can_pair: bool = True) -> tuple[WorkerGroup, WorkerGroup]:
    place = NodePlacementStrategy([0])
    return (
        Lender.create_group(can_pair).launch(cluster, place, name="lender"),
        Lender.create_group().launch(cluster, place, name="taker"),
    )


def test_tensors_are_fetched_in_a_process_group_of_two(small_cluster):
    lender, taker = launch_lenders(small_cluster)
    sizes = list(range(1, 20))
    lent = lender.lend("taker", sizes)
    assert taker.fetch("lender", len(sizes), 4).wait(120) == [[(size, float(size)) for size in sizes]]
    assert lent.wait(60) == [[None] * len(sizes)], "all loans are back"
    assert (lender.refused().wait(60), taker.refused().wait(60)) == ([False], [False])


def test_tensors_go_through_the_host_where_no_process_group_can_be_made(small_cluster):
    lender, taker = launch_lenders(small_cluster, can_pair=False)
    lent = lender.lend("taker", [5])
    assert taker.fetch("lender", 1, 1).wait(120) == [[(5, 5.0)]]
    assert lent.wait(60) == [[None]]
    assert taker.refused().wait(60) == [True]
