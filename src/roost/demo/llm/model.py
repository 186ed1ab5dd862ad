"""A tiny transformer with random weights, and a task that it can learn in a minute."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

from roost.rl.engines.samples import Prompt

END, START, PAD = 257, 256, 258
"""Tokens besides the 256 bytes."""
_VOCABULARY = 320
DIGITS = tuple(b"0123456789")
"""The tokens that an answer may have."""
REPEATS = 6
"""How often an answer has to repeat the digit of its prompt."""


def write_model(folder: Path, seed: int, *, layers: int = 4, width: int = 192, is_tied: bool = False) -> None:
    """Write a random model of the kind Qwen3 as a checkpoint; its tokens are bytes, and it has 1.6 M parameters."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizers = importlib.import_module("tokenizers")
    words = {f"<{byte:02x}>": byte for byte in range(256)} | {"<start>": START, "<end>": END, "<pad>": PAD}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 - a token
    special = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def make_prompts(step: int, seed: int, count: int, samples: int) -> list[Prompt]:
    """Return prompts such as `5=`, the right answer to which is `555555`."""
    choose = random.Random(f"{seed} {step}")  # noqa: S311 - to be repeated
    return [
        Prompt(
            tokens=(choose.choice(DIGITS), ord("=")),
            n=samples,
            max_tokens=REPEATS,
            ignore_eos=True,
            allowed_token_ids=DIGITS,
        )
        for _ in range(count)
    ]


def reward(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    """Return which part of an answer is right.

    >>> reward((53, 61), (53, 53, 53, 48, 48, 48))
    0.5
    """
    return sum(token == prompt[0] for token in tokens) / REPEATS
