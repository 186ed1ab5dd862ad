"""Tensors that left an accelerator come back, also after a try for which there was no room."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from roost.machine.devices import nvidia_devices
from roost.rl.host_copies import HostCopies


@pytest.fixture
def torch() -> Any:
    """The module, imported when a test needs it: that takes seconds of every process that collects this file."""
    return pytest.importorskip("torch", reason="torch is not installed")


class Tensor:
    """Stands in for a tensor on the host, for whose device there is room or not."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.data: Any = self
        self.device = "host"

    def to(self, device: str, non_blocking: bool) -> Tensor:
        assert non_blocking
        if self.failures:
            self.failures -= 1
            raise sys.modules["torch"].OutOfMemoryError("no room")
        self.device = device
        return self


def test_tensors_that_there_was_no_room_for_come_back_at_the_next_try(monkeypatch, torch):
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    tensors = [Tensor(), Tensor(failures=1), Tensor()]
    copies = HostCopies()
    copies._away = [(one, "device") for one in tensors]
    with pytest.raises(torch.OutOfMemoryError):
        copies.come_back()
    assert "host" in [one.device for one in tensors]
    copies.come_back()
    assert [one.device for one in tensors] == ["device"] * 3
    assert waited == ["device"]


@pytest.mark.skipif(not nvidia_devices()[0], reason="needs a GPU")
def test_weights_on_a_device_leave_all_of_it(tmp_path, torch):
    from roost.rl.engines.staging import StagedOnDevice
    from roost.weights.safetensors import save_safetensors

    save_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(1 << 24)})
    staged = StagedOnDevice(tmp_path, lambda *_: None)
    staged.fill({"w": torch.full((1 << 24,), 3.0)})
    before = torch.cuda.memory_reserved()
    staged.leave()
    assert torch.cuda.memory_reserved() <= before - (1 << 26)
    staged.come_back()
    assert float(staged.tensors()["w"][7]) == 3.0
    assert staged.tensors()["w"].is_cuda
    staged.close()
