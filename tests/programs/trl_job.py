"""TRL's GRPOTrainer with a tiny model: `torchrun trl_job.py FOLDER` starts it on each rank, and so does `Rank`."""

import json
import os
import sys
from pathlib import Path

from roost import Worker

WORDS = [f"w{number}" for number in range(30)]


def make_model(folder: str) -> None:
    """Make a random language model with a vocabulary of its own."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pad, end = "<pad>", "<eos>"
    vocabulary = {word: number for number, word in enumerate([pad, end, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end)
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(vocab_size=len(vocabulary), tie_word_embeddings=False, **sizes, **heads, **ids)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def reward(completions, **_):
    return [float(sum(word in WORDS[:15] for word in text.split())) for text in completions]


def train(folder: str) -> None:
    """Train for three steps; every rank writes its losses and the weights at the end."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    rank = os.environ["RANK"]
    torch.set_num_threads(1)
    config = GRPOConfig(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=f"{folder}/model",
        reward_funcs=reward,
        args=config,
        processing_class=PreTrainedTokenizerFast.from_pretrained(f"{folder}/model"),
        train_dataset=Dataset.from_list([{"prompt": f"{a} {b}"} for a, b in zip(WORDS, WORDS[3:], strict=False)]),
    )
    trainer.train()
    history = [[step["loss"], step["reward"]] for step in trainer.state.log_history if "loss" in step]
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    weights = {name: value.double().sum().item().hex() for name, value in state.items()}
    found = {"history": history, "weights": weights, "ranks": trainer.accelerator.num_processes}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))


class Rank(Worker):
    def train(self, folder: str) -> None:
        train(folder)


if __name__ == "__main__":
    train(sys.argv[1])
