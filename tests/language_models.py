"""A trainer with a language model, for tests with real engines."""

from __future__ import annotations

from typing import Any

from roost.weights import WeightWorker


class Trainer(WeightWorker):
    """Has the weights of a model, and says what that model generates."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(1)
        self.model = self._read(folder)

    def _read(self, folder: str) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    def offer(self) -> Any:
        return self.model

    def load(self, folder: str) -> None:
        """Have the weights of another model, in the same memory."""
        import torch

        with torch.no_grad():
            for own, new in zip(self.model.parameters(), self._read(folder).parameters(), strict=True):
                own.copy_(new)

    def greedy(self, tokens: tuple[int, ...], count: int) -> tuple[tuple[int, ...], list[float]]:
        """What the model generates, and the log probability of each token."""
        import torch

        made, logprobs = torch.tensor([tokens]), []
        with torch.no_grad():
            for _ in range(count):
                found = torch.log_softmax(self.model(made).logits[0, -1], -1)
                logprobs.append(float(found.max()))
                made = torch.cat([made, found.argmax()[None, None]], 1)
        return tuple(made[0, len(tokens) :].tolist()), logprobs
