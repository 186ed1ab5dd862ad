"""The proxies of managers, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.exceptions import GetTimeoutError

from roost import ClusterError, WorkerManager
from roost.deadline import Deadline
from roost.runtime.managers import base


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> WorkerManager:
    """The proxy of a manager that does not answer."""

    def get(*_: Any) -> NoReturn:
        raise GetTimeoutError

    monkeypatch.setattr(base, "get", get)
    calls: Any = SimpleNamespace(get_groups=SimpleNamespace(remote=lambda: None))
    return WorkerManager(calls, "roost")


@pytest.mark.parametrize(
    ("left", "said"),
    [(0.3, r"in 0\.3 s, which its caller had left$"), (0.0, r"in 0\.1 s, which"), (600, "in 60 s$")],
)
def test_a_manager_that_does_not_answer_in_the_rest_of_a_deadline_says_how_long_that_was(silent, left, said):
    with pytest.raises(ClusterError, match=f"the WorkerManager of 'roost' did not answer 'get_groups' {said}"):
        silent.until(Deadline.after(left)).get_groups()


def test_a_manager_that_does_not_answer_says_how_long_it_had(silent):
    with pytest.raises(ClusterError, match=r"did not answer 'get_groups' in 5 s$"):
        silent.within(5).get_groups()
