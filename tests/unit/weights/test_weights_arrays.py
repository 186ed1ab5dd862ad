"""Arrays of numpy and tensors of torch are copied into each other, also in types that numpy does not have."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from roost.comm.move.arrays import can_wrap, copy
from roost.deadline import NEVER
from roost.weights.layout import Held, Layout, TensorSpec
from roost.weights.member import MemberLink
from roost.weights.plan import Place, make_sync_plan
from roost.weights.update import Request, Verb
from roost.weights.versions import Versions


def test_a_type_that_numpy_does_not_have_is_cast_on_the_way_into_an_array():
    torch = pytest.importorskip("torch")
    target = np.zeros((2, 3), np.float32)
    copy(target, torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_target_without_torch_refuses_a_type_of_torch_in_the_plan(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert [name for name in ("float16", "bool", "int8", "bfloat16", "float8_e5m2") if not can_wrap(name)] == [
        "bfloat16",
        "float8_e5m2",
    ]
    sides = [
        Layout.from_reports({worker: [Held(name="w", spec=TensorSpec((4,), dtype), box=((0, 4),))]})
        for worker, dtype in (("actor:0", "bfloat16"), ("rollout:0", "float32"))
    ]
    plan = make_sync_plan(*sides, {"actor:0": Place(0, (0,)), "rollout:0": Place(0, (1,))})
    worker = SimpleNamespace(address="rollout:0", accept=lambda: {"w": np.zeros(4, np.float32)})
    link = MemberLink(worker, Versions("rollout:0"), "link", in_place=False, may_share=True)
    answers: SimpleQueue[tuple[bool, object]] = SimpleQueue()
    link.ask(
        Request("rollout:0", Verb.LEARN, details=(plan, "offer", True)), NEVER, lambda *answer: answers.put(answer)
    )
    assert answers.get(timeout=60) == (True, ["rollout:0 gets bfloat16, which takes torch there"])
    link.close()
