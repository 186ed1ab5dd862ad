"""What the tests without a cluster share: the runs of each are its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no run where other tests of this process look for theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
