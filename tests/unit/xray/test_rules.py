"""From facts to findings: each rule of `roost xray`, without Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roost.xray.facts import Actor, Bundle, Driver, Facts, Gpu, Group, Node, Process, Stack, Task, redacted
from roost.xray.judge import Finding, judge
from roost.xray.names import fold_names, name_actors, role_of
from roost.xray.show import as_data, draw_xray, report_files
from roost.xray.stacks import place_of
from roost.xray.waits import find_shortage

GOLDEN = Path(__file__).parents[2] / "golden" / "files" / "xray"
NOW = 1_000_000.0


def actor(name: str, **values: object) -> Actor:
    settings = {"id": name, "class_name": "Trainer", "job": "01", "state": "ALIVE", "name": name, "node": "a"}
    return Actor(**{**settings, "pid": 10 + sum(map(ord, name)), "worker": "w", **values})


def node(name: str, gpus: float = 4, cpus: float = 8, free: dict[str, float] | None = None, **values: object) -> Node:
    total = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    return Node(
        id=name, address=f"10.0.0.{ord(name) - 96}", total=total, free=total if free is None else free, **values
    )


def cluster(**values: object) -> Facts:
    driver = Driver(id="01", pid=7, address="10.0.0.1", entrypoint="python train.py")
    return Facts(**{"address": "10.0.0.1:6379", "at": NOW, "nodes": (node("a"),), "drivers": (driver,), **values})


def only(facts: Facts) -> Finding:
    (finding,) = judge(facts)
    return finding


def group(*bundles: Bundle, **values: object) -> Group:
    settings = {"id": "g", "name": "pool", "job": "01", "strategy": "PACK", "state": "PENDING", "since": NOW - 75}
    return Group(**{**settings, "bundles": bundles, **values})


def test_a_cluster_without_a_fault_has_no_finding():
    assert judge(cluster(actors=(actor("t0", holds={0: 1.0}, wants={"GPU": 1}),))) == []


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_what_has_room_has_no_shortage(strategy):
    nodes = [node("a"), node("b")]
    assert find_shortage([Bundle(wants={"GPU": 2}), Bundle(wants={"GPU": 2})], strategy, nodes) is None


@pytest.mark.parametrize(
    ("bundles", "strategy", "index", "fit", "never", "short"),
    [
        ([{"GPU": 4}] * 3, "PACK", 2, 2, True, ("GPU",)),
        ([{"GPU": 1}] * 3, "STRICT_SPREAD", 2, 2, True, ()),
        ([{"GPU": 3}] * 2, "STRICT_PACK", None, 0, True, ("GPU",)),
        ([{"GPU": 1, "CPU": 9}], "PACK", 0, 0, True, ("CPU",)),
        ([{"TPU": 1}], "PACK", 0, 0, True, ("TPU",)),
    ],
)
def test_a_shortage_that_no_end_of_others_cures(bundles, strategy, index, fit, never, short):
    nodes = [node("a", free={}), node("b", free={})]
    found = find_shortage([Bundle(wants=item) for item in bundles], strategy, nodes)
    assert (found.index, found.fit, found.is_never, found.short) == (index, fit, never, short)


def test_what_is_left_nowhere_together_is_not_short_of_one_thing():
    nodes = [node("a", free={"GPU": 4, "CPU": 0}), node("b", free={"GPU": 0, "CPU": 8})]
    found = find_shortage([Bundle(wants={"GPU": 1, "CPU": 1})], "PACK", nodes)
    assert (found.is_never, found.short) == (False, ())
    assert found.lacks == ("10.0.0.1: 0 of 8 CPU left", "10.0.0.2: 0 of 4 GPU left")


def test_labels_and_dead_nodes_count():
    nodes = [node("a", labels={"zone": "x"}), node("b", died="it ended")]
    assert find_shortage([Bundle(wants={"GPU": 1}, labels={"zone": "x"})], "PACK", nodes) is None
    found = find_shortage([Bundle(wants={"GPU": 1}, labels={"zone": "y"})], "PACK", nodes)
    assert found.lacks == ("10.0.0.1: has not the labels zone=y",)


def test_a_group_that_waits_names_what_is_short_and_who_has_it():
    busy = (actor("t0", wants={"CPU": 5}), actor("t1", wants={"CPU": 2}))
    facts = cluster(nodes=(node("a", free={"CPU": 1, "GPU": 4}),), actors=busy)
    found = only(replace(facts, groups=(group(Bundle(wants={"CPU": 1}), Bundle(wants={"CPU": 2})),)))
    assert found.text == (
        "placement group 'pool' waits for 75 s for bundle 1 of 2 (2 CPU; PACK), and no node has enough CPU left"
    )
    assert found.evidence == (
        "10.0.0.1: 1 of 8 CPU left",
        "held: 7 CPU: t0-1, of job 01 (pid 7 on 10.0.0.1: python train.py)",
    )


def test_holders_of_groups_and_of_tasks_are_named():
    held = group(Bundle(wants={"GPU": 2}, node="a"), state="CREATED", id="h", name="held")
    waits = actor("late", state="PENDING_CREATION", worker="", node="", wants={"GPU": 2})
    facts = cluster(nodes=(node("a", free={"GPU": 1}),), groups=(held,), actors=(actor("in", group="h"), waits))
    found = only(facts)
    assert found.text == "actor late waits for 2 GPU, and no node has enough GPU left"
    assert found.evidence[1].startswith("held: 2 GPU: placement group 'held', in which in runs, of job 01")
    assert found.evidence[2] == "held: 1 GPU: tasks, or actors that Ray does not list"


def test_actors_that_are_not_ready_say_for_what_they_wait():
    waits = group(Bundle(wants={"GPU": 99}))
    actors = (
        actor("p0", state="PENDING_CREATION", worker="", node="", group="g", since=NOW - 8000),
        actor("p1", state="PENDING_CREATION", worker="", node="", group="g"),
        actor("c", state="PENDING_CREATION", since=NOW - 200),
        actor(
            "q",
            state="PENDING_CREATION",
            worker="",
            node="",
            group="full",
            wants={"GPU": 1},
            wants_of_group={"GPU_group_full": 1, "GPU_group_0_full": 1},
        ),
        actor("d", state="DEPENDENCIES_UNREADY"),
        actor("r", state="RESTARTING", restarts=2, log=("KeyError: 1",)),
    )
    full = group(Bundle(wants={"GPU": 1}, node="a"), id="full", name="full", state="CREATED")
    facts = cluster(actors=actors, groups=(waits, full))
    texts = {item.text: item.level for item in judge(facts)}
    waiting = "actor q waits for placement group 'full', which has"
    assert texts[f"{waiting} no bundle with 1 GPU left"] == "problem"
    roomy = replace(facts, nodes=(node("a", free={"GPU": 3, "CPU": 8, "GPU_group_full": 1}),))
    assert {item.text for item in judge(roomy)} == {*texts}, "that is in another bundle"
    roomy = replace(facts, nodes=(node("a", free={"GPU_group_full": 1, "GPU_group_0_full": 1}),))
    assert {item.text: item.level for item in judge(roomy)}[f"{waiting} room: a process starts"] == "note"
    assert texts["2 actors p0-1 wait for 2 h for placement group 'pool', which has no place yet"] == "note"
    assert any(text.startswith("actor c runs its constructor for 3 min, pid ") for text in texts)
    assert "actor d waits for the results that its constructor gets as arguments" in texts
    assert texts["actor r died and is being restarted, for the second time"] == "warning"


def test_what_has_room_now_is_no_problem():
    assert only(cluster(groups=(group(Bundle(wants={"CPU": 1})),))).level == "note"


def test_gpus_that_are_left_in_halves_may_be_no_room():
    halves = tuple(actor(f"h{index}", holds={index: 0.5}, wants={"GPU": 0.5}) for index in range(2))
    late = actor("late", state="PENDING_CREATION", worker="", node="", wants={"GPU": 1})
    facts = cluster(nodes=(node("a", gpus=2, free={"GPU": 1}),), actors=(*halves, late))
    assert only(facts).text.endswith("room for it now: in sum, and perhaps on no single GPU: some are shared")
    assert only(replace(facts, actors=(late,))).text.endswith("Ray places it soon, or starts its process")


@pytest.mark.parametrize(
    ("reason", "cause", "log", "text"),
    [
        ("OOM", "killed by the memory monitor", (), "killed for memory"),
        ("WORKER_DIED", "1 worker(s) were killed due to the node running low on memory", (), "killed for memory"),
        ("WORKER_DIED", "End of file. Some common causes include: killed by the OOM killer", (), "the process ended"),
        ("WORKER_DIED", "There are some potential root causes. (1) SIGKILL by OOM killer", (), "the process ended"),
        ("WORKER_DIED", "Some common causes", ("torch.OutOfMemoryError: CUDA",), "the process ended"),
        ("WORKER_DIED", "Some common causes", ("it is out of memory",), "killed for memory"),
        ("CREATION", "RuntimeError: CUDA out of memory", (), "the constructor raised an exception"),
        ("NODE_DIED", "", (), "the node died"),
        ("CREATION", "ValueError: 1", (), "the constructor raised an exception"),
        ("RUNTIME_ENV", "pip failed", (), "the runtime environment could not be made"),
    ],
)
def test_a_death_is_named_by_its_cause(reason, cause, log, text):
    found = only(cluster(actors=(actor("t0", state="DEAD", reason=reason, cause=cause, log=log),)))
    assert (found.level, found.text) == ("problem", f"actor t0 is dead: {text}")
    assert all(f"log: {line}" in found.evidence for line in log)


def test_deaths_alike_are_one_finding_and_ends_that_were_asked_for_none():
    dead = [actor(f"t{index}", state="DEAD", reason="WORKER_DIED", cause="gone") for index in range(8)]
    assert only(cluster(actors=tuple(dead))).text == "8 actors t0-7 are dead: the process ended"
    killed = [actor(reason, state="DEAD", reason=reason) for reason in ("RAY_KILL", "OUT_OF_SCOPE", "OWNER_DIED")]
    assert judge(cluster(actors=tuple(killed))) == []


def test_two_actors_that_are_told_to_use_one_gpu():
    given, told = actor("t0", holds={0: 1.0}), actor("t1", told=(0,))
    found = only(cluster(actors=(given, told)))
    assert found.text == "GPU 0 of 10.0.0.1 has 2 owners: t0-1"
    assert found.evidence == ("t0: given by Ray", "t1: CUDA_VISIBLE_DEVICES, with num_gpus=0")
    assert judge(cluster(actors=(given, replace(told, node="b")))) == [], "each has its own"
    shared = (actor("s0", holds={0: 0.5}), actor("s1", holds={0: 0.5}))
    assert judge(cluster(actors=shared)) == [], "Ray shares it out on purpose"


def test_gpus_as_they_are_measured():
    first, second = actor("t0", holds={0: 1.0}, pid=50), actor("t1", holds={1: 1.0}, pid=51)
    used = Gpu(index=0, pids=(50,), memory_used=2**33, memory=2**36)

    def texts(*gpus: Gpu) -> list[str]:
        measured = replace(node("a", gpus=2), gpus=gpus)
        return [item.text for item in judge(cluster(nodes=(measured,), actors=(first, second)))]

    assert texts(used, replace(used, index=1, pids=(51,))) == []
    assert texts(used, Gpu(index=1)) == ["1 GPU of 10.0.0.1 (1) taken and unused: t1"]
    assert texts(used, replace(used, index=1)) == ["GPU 1 of 10.0.0.1 is used by t0, and Ray has given it to t1"]
    other = replace(used, index=1, pids=(51, 99), strangers=("pid 99 (bob: serve.py)",))
    assert texts(used, other) == ["GPU 1 of 10.0.0.1 is used by pid 99 (bob: serve.py), which is not Ray's"]
    assert texts(used, replace(used, index=1, pids=(99,))) == [], "a child of the actor"
    assert texts(used, replace(used, index=1, pids=())) == [], "a container hides the pids, and not the memory"


def test_a_group_that_holds_gpus_for_nobody():
    found = only(cluster(groups=(group(Bundle(wants={"GPU": 2}, node="a"), state="CREATED"),)))
    assert "holds 2 GPU for 75 s, and no actor is in it" in found.text


def test_a_node_whose_memory_runs_out_and_a_node_that_died():
    large = (
        Process(pid=actor("t0").pid, memory=2**36, command="ray::Trainer"),
        Process(pid=1, memory=2**35, command="x"),
    )
    full = replace(node("a"), memory=(95 * 2**30, 100 * 2**30), processes=large)
    memory, died = judge(cluster(nodes=(full, node("b", died="it ended")), actors=(actor("t0"),)))
    assert memory.text == "the memory of 10.0.0.1 is 95% full: 95.0 GiB of 100.0 GiB"
    assert memory.evidence == (f"64.0 GiB: t0, pid {actor('t0').pid}", "32.0 GiB: x, pid 1")
    assert (died.text, died.evidence) == ("1 node left the cluster", ("10.0.0.2: it ended",))


def test_a_task_that_no_node_can_hold_is_a_problem_and_a_queue_is_not():
    never = only(cluster(tasks=(Task(name="f", wants={"GPU": 9}, count=2, since=NOW - 5),)))
    assert (never.level, never.text[:33]) == ("problem", "2 tasks f wait for 5 s for 9 GPU,")
    queued = cluster(nodes=(node("a", free={}),), tasks=(Task(name="f", wants={"GPU": 1}, count=1),))
    assert only(queued).level == "note"


def stacks(*places: str) -> Facts:
    actors = tuple(actor(f"t{index}") for index in range(len(places)))
    found = tuple(Stack(id=item.id, place=place, text="") for item, place in zip(actors, places, strict=True))
    return cluster(actors=actors, stacks=found)


def test_a_straggler_is_named():
    found = only(stacks(*["all_reduce"] * 3, "DataLoader.__next__", *["all_reduce"] * 4))
    assert (found.level, found.text) == ("problem", "7 of 8 Trainer in all_reduce, t3 in DataLoader.__next__")
    assert only(stacks("all_gather", "barrier")).evidence == ("not all are in the same call",)
    assert only(stacks("all_reduce", "all_reduce")).level == "note", "the usual moment of a step"
    assert judge(stacks("forward", "no call", "forward (model.py:3)")) == []
    assert only(stacks("all_reduce", *["forward (model.py:3)"] * 7)).level == "note", "one is there first"


def test_who_was_not_seen_or_is_of_another_job_is_no_straggler_and_not_among_all():
    seen = stacks("all_reduce", "all_reduce", "load (data.py:3)")
    first, second, third = seen.actors
    assert "all 2 Trainer are" in only(replace(seen, actors=(first, second, replace(third, job="02")))).text
    assert only(replace(seen, stacks=seen.stacks[:2])).text.startswith("2 of 3 Trainer, all that could be seen, are")


def test_an_exception_of_a_constructor_is_told_by_its_end():
    cause = 'Traceback (most recent call last):\n  File "a.py", line 1, in __init__\n    load()\nKeyError: "no\nkey"\n'
    dead = [actor(f"t{index}", state="DEAD", reason="CREATION", cause=cause) for index in range(2)]
    found = judge(cluster(actors=(dead[0], replace(dead[1], cause=cause.replace("Key", "Value")))))
    assert [item.evidence[0].partition(": ")[2] for item in found] == ['KeyError: "no key"', 'ValueError: "no key"']


MAIN = 'Thread 5 (idle): "MainThread"\n'
LOOP = "    Worker.main_loop (ray/_private/worker.py:1069)\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (MAIN + LOOP, "no call"),
        (MAIN + "    Trainer.load (train.py:9)\n" + LOOP, "Trainer.load (train.py:9)"),
        (
            MAIN + "    get (ray/_private/worker.py:2)\n    wrapper (ray/_private/h.py:1)\n    main (t.py:1)\n",
            "ray.get",
        ),
        (MAIN + "    recv (multiprocessing/connection.py:1)\n    step (e.py:7)\n" + LOOP, "recv (connection.py)"),
        (MAIN + "    wait (threading.py:3)\n    get (queue.py:1)\n    take (loader.py:7)\n" + LOOP, "get"),
        (
            MAIN + "    step (native.so)\n    all_reduce (torch/distributed/d.py:1)\n    f (t.py:1)\n" + LOOP,
            "all_reduce",
        ),
        (MAIN + "    __next__ (torch/utils/data/dataloader.py:1)\n    f (t.py:1)\n" + LOOP, "dataloader.__next__"),
        (MAIN + LOOP + 'Thread 6 (idle): "wandb"\n    poll (wandb_run.py:1)\n', "no call"),
        (
            MAIN + LOOP + 'Thread 6 (idle): "AsyncIO Thread: default"\n    run (asyncio/runners.py:1)\n',
            "its event loop",
        ),
        ("", "unknown"),
        ("not what py-spy writes", "unknown"),
    ],
)
def test_where_a_process_stands(text, place):
    assert place_of(text) == place


@pytest.mark.parametrize(
    ("class_name", "name", "role"),
    [
        ("WorkerDict", "x7YkaBWorkerDict_0:3", "train and rollout"),
        ("MegatronTrainRayActor", "", "train"),
        ("SGLangEngine", "", "rollout"),
        ("RolloutManager", "", "rollout manager"),
        ("CriticModelActor", "", "critic"),
        ("ReferenceModelActor", "", "reference"),
        ("RewardModelActor", "", "reward"),
        ("PolicyModelActor", "", "train"),
        ("LLMRayActor", "", "rollout"),
        ("Counter", "mine", ""),
    ],
)
def test_the_roles_of_known_frameworks(class_name, name, role):
    assert role_of(actor(name, class_name=class_name)) == role


def test_names_of_actors():
    ranked = [Actor(id=str(rank), class_name="W", job="1", state="ALIVE", rank=rank) for rank in (3, 1)]
    assert name_actors(ranked) == {"3": "W:3", "1": "W:1"}
    assert fold_names(["t0", "t1", "job 01000000", "t3", "é"]) == "t0-1,3, job 01000000, é"
    assert fold_names([f"name{'x' * index}" for index in range(1, 9)]).endswith(" and 2 more")


HIDES = "sekret123"


def test_no_secret_and_no_escape_is_shown_anywhere():
    bad = f"\x1b[2J ValueError: api_key={HIDES}"
    facts = cluster(
        nodes=(replace(node("a"), name=bad, processes=(Process(pid=1, memory=1, command=f"x --token {HIDES}"),)),),
        drivers=(Driver(id="01", pid=7, address="10.0.0.1", entrypoint=f"train.py --wandb-key={HIDES}"),),
        actors=(
            replace(actor("a"), name=bad, class_name=bad),
            actor("b", state="DEAD", reason="CREATION", cause=bad, log=(f"password: {HIDES}",)),
        ),
        groups=(group(Bundle(wants={bad: 1}), name=bad),),
        tasks=(Task(name=bad, wants={"GPU": 9}, count=1),),
        stacks=(Stack(id="a", place=bad, text=f'url = "http://me:{HIDES}@host"\n'),),
        unknown=(bad,),
    )
    facts = redacted(facts)
    findings = judge(facts)
    files = report_files(facts, findings)
    assert {*files} >= {"xray.html", "xray.txt", "xray.json"}
    for name, text in files.items():
        assert HIDES not in text, name
        assert "\x1b" not in text, name
    assert "ValueError: api_key=***" in draw_xray(facts, findings).plain
    assert json.dumps(as_data(facts, findings))


def test_the_picture(golden):
    workers = [
        Actor(id=f"w{index}", class_name="WorkerDict", job="01", state="ALIVE", name=f"abWorkerDict_0:{index}",
              node="a", pid=100 + index, worker="w", holds={index: 1.0}, wants={"GPU": 1}, memory=2**31)
        for index in range(3)
    ]  # fmt: skip
    told = actor("judge", told=(2,), class_name="Judge")
    dead = actor("env", state="DEAD", reason="OOM", cause="the node ran low on memory", log=("loading",))
    facts = cluster(
        nodes=(
            replace(node("a", free={"CPU": 2, "GPU": 1}), is_head=True, memory=(2**34, 2**36)),
            node("b", gpus=0),
        ),
        actors=(*workers, told, dead, actor("idle", class_name="Env", node="b")),
        groups=(group(Bundle(wants={"GPU": 2}), Bundle(wants={"GPU": 2}), name="<rollout> & co"),),
        stacks=(Stack(id="w0", place="all_reduce", text="…"), Stack(id="w1", place="load (t.py:3)", text="…")),
        unknown=("stacks of 1 process: py-spy: no permission",),
    )
    findings = judge(facts)
    files = report_files(facts, findings)
    golden(GOLDEN / "report.txt", files["xray.txt"])
    golden(GOLDEN / "report.html", files["xray.html"])
    assert "&lt;rollout&gt; &amp; co" in files["xray.html"]
