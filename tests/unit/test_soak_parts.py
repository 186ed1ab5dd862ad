"""The pure half of the soak: a schedule follows from its seed, and each invariant fails on a history that breaks it."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roost.runtime.events.format import header
from roost.runtime.runs.index import LOCK_FILE
from soak import claims
from soak.history import GRACE_SECONDS, INVARIANTS, DriverEnd, History, InjectedFault, check
from soak.inject import Thief, accepted_from_peers, impossible_here, reset, starved
from soak.page import Readers
from soak.record import Recorder, read_events
from soak.schedule import FAULTS, choose_faults, make_round

TESTS = Path(__file__).resolve().parents[1]


def begin(op: str, t: float, *, what: str = "call", limit: float = 10.0, who: str = "d0", **more: object) -> dict:
    return {"e": "begin", "op": op, "t": t, "what": what, "limit": limit, "who": who, "pid": 7, **more}


def end(op: str, t: float, *bases: str, text: str = "", who: str = "d0") -> dict:
    error = {"type": bases[0], "bases": list(bases), "text": text} if bases else None
    return {"e": "end", "op": op, "t": t, "who": who, "ok": not bases, "error": error}


def note(kind: str, t: float, **more: object) -> dict:
    return {"e": kind, "t": t, "who": "d0", "pid": 7, **more}


def put(op: str, t: float, *ids: str, acknowledged: bool = True) -> list[dict]:
    ended = [end(op, t + 0.1)] if acknowledged else []
    return [begin(op, t, what="put"), note("put", t, op=op, ids=list(ids)), *ended]


def get(op: str, t: float, *ids: str) -> list[dict]:
    return [begin(op, t, what="get", count=len(ids)), note("get", t + 0.1, op=op, ids=list(ids)), end(op, t + 0.1)]


def raised(t: float, name: str = "oops-1") -> dict:
    return note("raised", t, name=name, address="g1:0")


def hidden(t: float, text: str) -> list[dict]:
    """A driver that fails in an operation, while a call that it does not ask for has failed."""
    error = end("h1", t + 1, "CallTimedOut", "RoostError", text=f"g1:0 {text}")
    return [begin("h1", t), raised(t), note("hidden", t, op="h1", name="oops-1"), error]


def piped(*taken: str, kinds: str = "emptied") -> list[dict]:
    """A pipeline into which `a` and `b` went."""
    known = {"pipeline": "l1"}
    into = [note(kind, 20.0, ids=["a", "b"], **known) for kind in ("feeding", "fed")]
    return [*into, note("taken", 21.0, ids=[*taken], **known), *(note(kind, 22.0, **known) for kind in kinds.split())]


KEPT = {"oops-1": ["log", "events"]}
DRAINED = note("resources", 99.0, when="drained", drained=True, descriptors=50, threads=[])
OPENED = note("resources", 1.0, when="opened", descriptors=50, threads=[], ports=3)
CLOSED = note("resources", 98.0, when="groups closed", descriptors=50, threads=[], ports=3)
GONE = note("resources", 99.0, when="closed", descriptors=50, threads=[])
LIVED = DriverEnd(who="d0", code=0, ended=100.0, was_killed=False)
KILLED = DriverEnd(who="d0", code=-9, ended=50.0, was_killed=True)

# One that keeps every invariant, with an error that is as it should be, and one of the user's own.
GOOD = History(
    events=[
        OPENED,
        *put("p1", 2.0, "a", "b"),
        *get("g1", 3.0, "a"),
        *get("g2", 4.0, "b"),
        begin("u1", 5.0, what="update"),
        note("update", 5.0, op="u1", version=1),
        end("u1", 6.0),
        begin("s1", 7.0, what="generate"),
        note("served", 7.1, op="s1", version=1),
        end("s1", 7.1),
        begin("c1", 8.0),
        end("c1", 9.0, "WorkerDied", "ClusterError", "RoostError", text="g1:0 on node 1 (…) died in 'echo'"),
        begin("c2", 10.0),
        end("c2", 11.0, "Oops", "Exception", text="mine"),
        DRAINED,
        CLOSED,
        GONE,
    ],
    drivers=[LIVED],
    left={"placement group": [], "process": []},
)


def broken(invariant: str, *events: dict, **more: object) -> History:
    """The good history with something in it that breaks one invariant."""
    given = {"drivers": [LIVED], "left": {}, "faults": []} | more
    return pytest.param(invariant, History(events=[*GOOD.events, *events], **given), id=f"{invariant}-{len(events)}")


def test_a_history_as_it_should_be_breaks_nothing():
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("invariant", "history"),
    [
        broken("no accelerator and no lock twice", note("clash", 9.0, what="node1-0", mine="d0", theirs="d1")),
        broken("right values", note("wrong", 9.0, op="c1", got=[1], want=[2])),
        broken("no sample lost or doubled", *put("p2", 20.0, "c")),
        broken("no sample lost or doubled", *get("g3", 20.0, "a")),
        broken("no sample lost or doubled", *get("g3", 20.0, "never put in")),
        # A consumer that died long before the sample came is no excuse, and neither is one that timed out.
        broken(
            "no sample lost or doubled",
            begin("g3", 20.0, what="get", count=1),
            *put("p2", 40.0, "c"),
            faults=[InjectedFault(name="kill-worker", target="ray::SoakWorker", began=30.0, ended=30.0, pid=7)],
            drivers=[],
        ),
        broken(
            "no sample lost or doubled",
            begin("g3", 20.0, what="get", count=1),
            end("g3", 21.0, "CallTimedOut", "RoostError", text="rollout_manager:0"),
            *put("p2", 21.0, "c"),
        ),
        broken(
            "weights never go back",
            begin("s2", 20.0, what="generate"),
            note("served", 20.1, op="s2", version=0),
            end("s2", 20.2),
        ),
        broken("every wait in time", begin("c3", 20.0, limit=10), end("c3", 31.0 + GRACE_SECONDS)),
        broken("every wait in time", begin("c3", 20.0, limit=10)),
        broken(
            "every wait in time",
            begin("c3", 20.0, limit=1),
            end("c3", 30.0),
            faults=[InjectedFault(name="stop-worker", target="another", began=21.0, ended=29.0, pid=8)],
        ),
        broken("every error names who", begin("c3", 20.0), end("c3", 21.0, "GetTimeoutError", text="node 1")),
        broken("every error names who", begin("c3", 20.0), end("c3", 21.0, "ClusterError", "RoostError", text="no")),
        broken("no exception vanishes", raised(20.0)),
        broken("no exception vanishes", raised(20.0), kept={"oops-1": ["events"]}),
        broken("no exception vanishes", *hidden(20.0, "is late"), kept=KEPT),
        # One that was killed long after it, and another one.
        broken(
            "no exception vanishes",
            raised(20.0),
            faults=[
                InjectedFault(name="kill-worker", target="x", began=29.0, ended=29.0, pid=7),
                InjectedFault(name="kill-worker", target="x", began=20.5, ended=20.5, pid=8),
            ],
        ),
        broken("no stranger gets in", note("leak", 9.0, what="Authorization", where="127.0.0.1:9")),
        broken("every page is right", note("page", 9.0, text="with a clock +1 h off, all look silent")),
        broken("no item of a pipeline lost or doubled", *piped("a")),
        broken("no item of a pipeline lost or doubled", *piped("a", "b", "a")),
        broken("no item of a pipeline lost or doubled", *piped("a", "b", "a", "b", kinds="emptied dying")),
        broken("no item of a pipeline lost or doubled", *piped("a", "b", "c")),
        broken("drivers live", drivers=[DriverEnd(who="d0", code=1, ended=60.0, was_killed=False)]),
        broken("drivers live", drivers=[DriverEnd(who="d0", code=None, ended=60.0, was_killed=False)]),
        broken("jobs recover", note("proved", 97.0, ok=False)),
        broken("nothing left", left={"placement group": ["roost:roost:1"]}),
        broken("nothing left", note("resources", 99.5, when="closed", descriptors=500, threads=[])),
        broken("nothing left", note("resources", 99.5, when="closed", descriptors=50, threads=["roost-watch"])),
        broken("nothing left", note("resources", 98.5, when="groups closed", descriptors=50, threads=[], ports=4)),
    ],
)
def test_each_invariant_fails_on_a_history_that_breaks_it_and_no_other_does(invariant, history):
    assert {violation.invariant for violation in check(history)} == {invariant}


def test_every_invariant_is_broken_by_some_history():
    marks = test_each_invariant_fails_on_a_history_that_breaks_it_and_no_other_does.pytestmark
    assert {param.values[0] for mark in marks for param in mark.args[1]} == set(INVARIANTS)


@pytest.mark.parametrize(
    "history",
    [
        # A worker died with an item, and nobody knows what is still in there.
        History(events=piped("a", "b", "a", kinds="emptied dying")),
        History(events=piped("a", kinds="")),
        # It is in all places, and the driver says so; or it cannot, since the network, the disk or the worker was gone.
        History(events=hidden(20.0, "is late; meanwhile failed: g1:0 in score: Oops: oops-1"), kept=KEPT),
        History(
            events=hidden(20.0, "is late"),
            kept=KEPT,
            faults=[InjectedFault(name="stop-driver", target="d0", began=20.5, ended=21.0, pid=9)],
        ),
        *(
            History(events=[raised(20.0)], faults=[InjectedFault(name=name, target="x", began=20.5, ended=20.5, pid=7)])
            for name in ("fill-disk", "kill-worker", "kill-raylet", "kill-driver", "cut-node")
        ),
        # The sample was in the hands of a consumer when that was killed.
        History(
            events=[begin("g3", 20.0, what="get", count=1, in_worker=True), *put("p2", 29.0, "c"), DRAINED],
            faults=[InjectedFault(name="kill-worker", target="ray::SoakWorker", began=30.0, ended=30.0, pid=7)],
            drivers=[LIVED],
        ),
        # It was in the hands of a consumer that was stopped when the buffer was drained.
        History(
            events=[begin("g3", 90.0, what="get", count=1, in_worker=True), *put("p2", 91.0, "c"), DRAINED],
            faults=[InjectedFault(name="stop-worker", target="ray::SoakWorker", began=92.0, ended=112.0, pid=7)],
            drivers=[LIVED],
        ),
        # It went with the manager; nobody acknowledged it; the driver that would have taken it was killed.
        History(
            events=[*put("p2", 20.0, "c"), DRAINED],
            faults=[InjectedFault(name="kill-rollout-manager", target="x", began=21.0, ended=21.0, pid=8)],
        ),
        History(events=[*put("p2", 20.0, "c"), begin("m", 21.0, what="restart manager"), end("m", 22.0), DRAINED]),
        History(events=[*put("p2", 20.0, "c", acknowledged=False), DRAINED], drivers=[KILLED]),
        History(events=put("p2", 20.0, "c"), drivers=[KILLED]),
        # It was itself stopped while it waited, or killed.
        History(
            events=[begin("c3", 20.0, limit=1), end("c3", 30.0)],
            faults=[InjectedFault(name="stop-driver", target="d0", began=21.0, ended=29.0, pid=7)],
            drivers=[LIVED],
        ),
        History(
            events=[begin("c3", 20.0, limit=1, in_worker=True), end("c3", 30.0)],
            faults=[InjectedFault(name="stop-worker", target="ray::SoakWorker", began=21.0, ended=29.0, pid=7)],
            drivers=[LIVED],
        ),
        History(events=[begin("c3", 20.0, limit=1)], drivers=[KILLED]),
        # Ray ended it because its raylet had died.
        History(drivers=[DriverEnd(who="d0", code=1, ended=60.0, was_killed=False, was_ended_by_ray=True)], events=[]),
        # The fault was a moment ago, or was the end of the cluster.
        History(
            events=[note("proved", 40.0, ok=False)],
            faults=[InjectedFault(name="stop-node-manager", target="x", began=30.0, ended=39.0)],
        ),
        History(
            events=[note("proved", 90.0, ok=False)],
            faults=[InjectedFault(name="kill-gcs", target="x", began=30.0, ended=30.0)],
        ),
    ],
)
def test_what_a_fault_explains_is_no_violation(history):
    assert check(history) == []


def test_the_same_seed_makes_the_same_round_and_others_make_others():
    faults = choose_faults()
    rounds = [make_round(seed, faults) for seed in range(200)]
    assert rounds == [make_round(seed, faults) for seed in range(200)]
    assert len(set(map(str, rounds))) == 200
    assert {fault.name for item in rounds for fault in item.faults} == set(FAULTS), "every fault has its turn"
    assert {len(item.accelerators) for item in rounds} == {3, 4, 5}
    assert {driver.has_rollout for item in rounds for driver in item.drivers} == {True, False}
    for item in rounds:
        assert all(2 <= driver.num_nodes <= len(item.accelerators) for driver in item.drivers)
        assert [fault.at for fault in item.faults] == sorted(fault.at for fault in item.faults)
        assert sum(FAULTS[fault.name].at_head for fault in item.faults) <= 1
        assert all(0 <= fault.pick <= 1 and fault.seconds > 0 for fault in item.faults)


def test_only_faults_that_are_allowed_are_chosen():
    for seed in range(50):
        assert {fault.name for fault in make_round(seed, ["kill-worker"]).faults} == {"kill-worker"}
        assert {fault.name for fault in make_round(seed, ["stop-gcs"]).faults} == {"stop-gcs"}
        assert make_round(seed, []).faults == ()
    with pytest.raises(ValueError, match="there is no fault kill-everything"):
        choose_faults("kill-everything")


def test_a_thief_answers_in_place_of_the_dead_and_notes_what_is_not_for_it():
    with Thief(("127.0.0.1", 0)) as thief:
        for request in (b"GET /roost/proof HTTP/1.1\r\n\r\n", b"GET /x HTTP/1.1\r\nAuthorization: Bearer 1\r\n\r\n"):
            with socket.create_connection(thief.server_address) as client:
                client.sendall(request)
                assert client.recv(15) == b"HTTP/1.1 200 OK"
    assert thief.heard == ["Authorization"]


HUNGRY = """
import os, sys
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(9)]
os.close(kept[3])
print("ready", flush=True)
for line in sys.stdin:
    try:
        with open("/dev/null"), open("/dev/null"):
            print("opened", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_a_process_that_starves_can_open_nothing_more_until_it_is_over():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HUNGRY], bufsize=1, **pipes) as hungry:

        def ask() -> str:
            hungry.stdin.write("\n")
            return hungry.stdout.readline().strip()

        assert hungry.stdout.readline() == "ready\n"
        with starved(psutil.Process(hungry.pid)):
            assert ask() == "Too many open files"
        assert ask() == "opened"


def test_readers_of_a_page_whose_clocks_are_wrong_are_compared_with_one_whose_clock_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr("soak.page.ALIVE_SECONDS", 1e6)
    monkeypatch.setattr("soak.page.MOST_SECONDS", 1e6)
    (tmp_path / "events").mkdir()
    first = header("driver", run="abc", pid=1, host="head", wall=time.time() - 1.0)
    (tmp_path / "events" / "driver.jsonl").write_text(f"{first}\n")
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        readers = Readers(tmp_path)
        assert readers.look() == [], "they have some time to find out"
        monkeypatch.setattr("soak.page.MOST_SECONDS", 0.0)
        (ahead,) = readers.look()
        assert ahead.startswith(f"with a clock +1 h off, the page of {tmp_path.name} has a present time that is +36")
    assert Readers(tmp_path).look() == [], "the run is over"


def test_a_claim_is_shared_by_one_owner_and_refused_to_another_until_the_process_ends(tmp_path):
    held = tmp_path / "claims"
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom pathlib import Path\nfrom soak.claims import claim\n"
    code += f"assert claim(Path({str(held)!r}), 'node1-0', 'd1') is None\nprint('held', flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        try:
            assert claims.claim(held, "node1-0", "d0", wait=0.1) == "d1"
            assert claims.claim(held, "node1-0", "d1", wait=0.1) is None
            claims.release_all()
            assert claims.claim(held, "node1-1", "d0", wait=0.1) is None
        finally:
            other.kill()
    assert claims.claim(held, "node1-0", "d0", wait=0.1) is None
    claims.release_all()


def test_what_is_recorded_can_be_read_and_half_a_line_is_dropped(tmp_path):
    recorder = Recorder(tmp_path, "d0")
    with recorder.op("call", 5.0) as op:
        op.expect(1, 1)
        op.expect(2, 3)
    with recorder.op("fail", 5.0):
        raise ValueError("mine")
    assert op.ok
    with (tmp_path / f"events-{os.getpid()}.jsonl").open("a") as file:
        file.write('{"e": "beg')
    events = read_events(tmp_path)
    assert [event["e"] for event in events] == ["begin", "wrong", "end", "begin", "end"]
    assert events[-1]["error"]["bases"] == ["ValueError", "Exception", "BaseException", "object"]
    assert {violation.invariant for violation in check(History(events=events))} == {
        "right values",
        "every error names who",
    }


LISTENING = """
import socket
tcp, near, wild = (socket.socket(family) for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_INET))
tcp.bind(("127.0.0.1", 0))
near.bind("\\0roost-test-" + str(tcp.getsockname()[1]))
wild.bind(("0.0.0.0", 0))
for listener in (tcp, near, wild):
    listener.listen()
print(tcp.getsockname()[1], wild.getsockname()[1], flush=True)
accepted = [listener.accept()[0] for listener in (tcp, near, wild)]
print("accepted", flush=True)
for one in accepted:
    try:
        print(one.recv(1), flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.skipif("reset" in impossible_here(), reason="only root can reset connections of other processes")
def test_a_connection_of_another_process_is_reset_at_both_ends_and_no_other():
    with subprocess.Popen([sys.executable, "-c", LISTENING], stdout=subprocess.PIPE, text=True) as other:
        port, wild = map(int, other.stdout.readline().split())
        with socket.socket(socket.AF_UNIX) as near, socket.create_connection(("127.0.0.1", port)) as far:
            near.connect(f"\0roost-test-{port}")
            with socket.create_connection(("127.0.0.1", wild)) as spared:
                assert other.stdout.readline() == "accepted\n"
                broken = 0
                for connection in accepted_from_peers(psutil.Process(other.pid)):
                    reset(connection)
                    broken += 1
                assert broken == 2
                with pytest.raises(ConnectionResetError):
                    far.recv(1)
                assert near.recv(1) == b""
                spared.sendall(b"x")
                tcp, *others = other.stdout.read().splitlines()
                assert tcp in ("ConnectionResetError", "BrokenPipeError")
                assert others == ["b''", "b'x'"]
