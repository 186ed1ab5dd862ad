"""A trainer with a language model, for tests with real engines."""

from __future__ import annotations

from collections.abc import Mapping
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


def save_chat_model(folder: Any, answers: Mapping[str, str]) -> None:
    """Save a tiny model that has learned answers to prompts by heart, and its tokenizer, whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    # It tells how many tools there are, which keeps prompts short.
    template = (
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% for call in one.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"
        "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", chat_template=template)  # noqa: S106
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ends))
    texts = [(tokenizer(prompt).input_ids, tokenizer(answer).input_ids) for prompt, answer in answers.items()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(1000):
        losses = []
        for prompt, answer in texts:
            tokens = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            labels = torch.tensor([[*[-100] * len(prompt), *answer, tokenizer.eos_token_id]])
            losses.append(model(input_ids=tokens, labels=labels).loss)
        loss = torch.stack(losses).mean()
        if loss < 0.03:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.03, f"it has not learned its answers: {loss}"
    model.save_pretrained(folder)
