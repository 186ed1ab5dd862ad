"""Prompts, and the rollout function that slime is given: each prompt's samples come from one engine."""

import json
import urllib.request

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample
from tracing import FOLDER, note


class Prompts:
    def __init__(self, args):
        self.args, self.next = args, 0

    def __len__(self):
        return 3 * self.args.rollout_batch_size

    def save(self, rollout_id):
        note("prompts", "save", rollout=rollout_id, next=self.next)

    def load(self, rollout_id=None):
        note("prompts", "load", rollout=rollout_id)


def generate(args, rollout_id, prompts, evaluation=False):
    urls = [path.read_text() for path in sorted(FOLDER.glob("engine-*.url"))]
    groups, versions = [], []
    for number in range(args.rollout_batch_size):
        group = []
        for _ in range(args.n_samples_per_prompt):
            with urllib.request.urlopen(f"{urls[number % len(urls)]}/{prompts.next}", timeout=60) as answer:
                made = json.load(answer)
            versions.append(made["version"])
            tokens, reward = made["tokens"], float(sum(made["tokens"]) % 5)
            index = prompts.next
            prompts.next += 1
            sample = Sample(index=index, rollout_id=index, tokens=[0, *tokens], response_length=len(tokens))
            sample.reward, sample.status = reward, Sample.Status.COMPLETED
            group.append(sample)
        groups.append(group)
    rewards = [sample.reward for group in groups for sample in group]
    note("prompts", "eval" if evaluation else "generate", rollout=rollout_id, versions=versions, rewards=rewards)
    return (
        RolloutFnEvalOutput(data={"all": {"rewards": rewards}}) if evaluation else RolloutFnTrainOutput(samples=groups)
    )
