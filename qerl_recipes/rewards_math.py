"""Rewards that compare a mathematical answer with the column ``solution``, by math-verify through TRL.

A solution that math-verify cannot read gives None: TRL leaves such a completion out of the reward's mean.
"""

import json
import math
from typing import Any

from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import ScriptArguments
from qerl_recipes.hooks import Reward
from qerl_recipes.rewards_text import text_of


def accuracy(completions: list[Any], solution: list[str], **columns: Any) -> list[float | None]:
    """1 where the LaTeX answer of the completion equals the solution, else 0; None where the solution is unreadable."""
    from trl.rewards import accuracy_reward

    messages = [[{"role": "assistant", "content": text_of(completion)}] for completion in completions]
    return accuracy_reward(messages, solution, log_extra=columns.get("log_extra"))


def dapo_score(completions: list[Any], solution: list[str], **columns: Any) -> list[float | None]:
    """1 where the answer equals the solution, else -1. Source: DAPO (arXiv 2503.14476), equation 7."""
    return [None if right is None else 2 * right - 1 for right in accuracy(completions, solution)]


def length(
    completions: list[Any], solution: list[str], prompts: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    """Shorter is better: 1/2 for the shortest answer to a prompt down to -1/2 for the longest; wrong ones at most 0.

    Lengths are characters; answers to one prompt are compared with each other, all 0 where they are equally long.
    Source: Kimi k1.5 (arXiv 2501.12599), section 2.3.3. Open-R1 compares with the whole batch, whatever the prompt.
    """
    correct = accuracy(completions, solution)
    lengths = [len(text_of(completion)) for completion in completions]
    keys = ["" if prompts is None else json.dumps(prompts[i], sort_keys=True) for i in range(len(completions))]
    rewards: list[float | None] = []
    for key, size, right in zip(keys, lengths, correct, strict=True):
        group = [other for other, other_key in zip(lengths, keys, strict=True) if other_key == key]
        shortest, longest = min(group), max(group)
        if right is None:
            rewards.append(None)
        elif shortest == longest:
            rewards.append(0.0)
        else:
            value = 0.5 - (size - shortest) / (longest - shortest)
            rewards.append(value if right else min(0.0, value))
    return rewards


def cosine(script: ScriptArguments) -> Reward:
    """Accuracy bent by length: right and short is best, wrong and short is worst or best as the four bounds say.

    Lengths are characters, as in Open-R1, and everything beyond ``cosine_max_len`` counts as that long, where Open-R1's
    cosine would rise again. Source: appendix C.1 of arXiv 2502.03373.
    """
    if script.cosine_max_len < 1:
        raise ConfigError(f"cosine_max_len must be at least 1 character, not {script.cosine_max_len}")

    def cosine(completions: list[Any], solution: list[str], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for completion, right in zip(completions, accuracy(completions, solution), strict=True):
            if right is None:
                rewards.append(None)
                continue
            progress = min(len(text_of(completion)) / script.cosine_max_len, 1.0)
            shortest, longest = (
                (script.cosine_max_value_correct, script.cosine_min_value_correct)
                if right
                else (script.cosine_min_value_wrong, script.cosine_max_value_wrong)
            )
            rewards.append(longest + 0.5 * (shortest - longest) * (1.0 + math.cos(progress * math.pi)))
        return rewards

    return cosine
