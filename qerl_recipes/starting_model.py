"""Makes the starting model of the demo: a Qwen2 of 304 thousand weights, taught running sums by supervised training.

    python -m qerl_recipes.starting_model OUT --seed 1

The training data go from worked examples (90 % of the answers step by step) to mostly terse ones (25 %). The model
ends up preferring the terse style, in which it is right four times out of ten, while it still knows the other, in
which it is right nine times out of ten. Reinforcement learning on exact match then has a better habit to discover.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from qerl_recipes import running_sum
from qerl_recipes.running_sum import LONGEST_COMPLETION, THINK, VOCABULARY, Problem

STEPS = 1500
BATCH = 64
LEARNING_RATE = 4e-3
WARMUP_STEPS = 50
STEP_BY_STEP_SHARE = (0.9, 0.25)  # at the start, and from 80 % of the steps on
LEAST_GAP = 0.2  # accuracy that thinking must be ahead by, or there is nothing for the policy to find out

_TOKEN_ID = {token: i for i, token in enumerate(VOCABULARY)}
_TOKENS = re.compile(running_sum.TOKEN)


def new_model(seed: int) -> Qwen2ForCausalLM:
    """An untrained Qwen2, hidden 128, 2 layers; every linear has columns in multiples of 16, as NVFP4 needs."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,  # 27 tokens, filled up to the width that embeddings are padded to anyway
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=_TOKEN_ID["<eos>"],
            pad_token_id=_TOKEN_ID["<pad>"],
            use_sliding_window=False,
        )
    )


def encode(text: str) -> list[int]:
    """Token ids; the same as the tokenizer's, without its cost in a training loop."""
    return [_TOKEN_ID[token] for token in _TOKENS.findall(text)]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.9 * cosine)


def step_by_step_share(step: int, steps: int) -> float:
    """Share of worked examples in the batch of this step."""
    first, last = STEP_BY_STEP_SHARE
    return first + (last - first) * min(1.0, step / steps / 0.8)


def draw_batch(rng: random.Random, share: float, held_out: set[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both ``(BATCH, longest)``, padded on the right; prompts and padding carry label -100.

    Causal attention keeps padding on the right out of every real position, so no attention mask is needed.
    """
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) < BATCH:
        problem = running_sum.draw(rng)
        if problem.prompt in held_out:
            continue
        response = problem.step_by_step if rng.random() < share else problem.terse
        rows.append((encode(problem.prompt), [*encode(response), _TOKEN_ID["<eos>"]]))
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((BATCH, longest), _TOKEN_ID["<pad>"])
    labels = torch.full((BATCH, longest), -100)
    for i, (question, reply) in enumerate(rows):
        end = len(question) + len(reply)
        ids[i, :end] = torch.tensor(question + reply)
        labels[i, len(question) : end] = torch.tensor(reply)
    return ids, labels


def train(model: PreTrainedModel, seed: int, steps: int = STEPS) -> None:
    """Supervised training in place; held-out prompts are never drawn."""
    rng = random.Random(1000 + seed)
    held_out = {problem.prompt for problem in running_sum.held_out()}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    with Progress(transient=True) as progress:
        for step in progress.track(range(steps), description="supervised training"):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            ids, labels = draw_batch(rng, step_by_step_share(step, steps), held_out)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def accuracy(model: PreTrainedModel, asked: Sequence[Problem], *, think: bool = False) -> float:
    """Greedy exact-match accuracy through Hugging Face generation; ``think`` begins every answer with ``<think>``."""
    tokenizer = running_sum.tokenizer()
    start = THINK if think else ""
    batch = tokenizer([p.prompt + start for p in asked], padding=True, return_tensors="pt")
    generated = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=LONGEST_COMPLETION,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [running_sum.answer_of(start + text) for text in texts]
    return sum(a == p.answer for a, p in zip(answers, asked, strict=True)) / len(asked)


def check_worth_learning(model: PreTrainedModel, asked: Sequence[Problem]) -> dict[str, float]:
    """Accuracy of both styles; a starting point from which reinforcement learning has nothing to find is refused.

    Raises ValueError if step-by-step answers are not at least 0.2 better than what the model does of itself.
    """
    of_itself, thinking = accuracy(model, asked), accuracy(model, asked, think=True)
    if thinking < of_itself + LEAST_GAP:
        raise ValueError(
            f"this starting model answers {of_itself:.1%} right of itself and {thinking:.1%} step by step; it must be "
            f"at least {LEAST_GAP:.0%} better step by step, or a reward for right answers has nothing to teach it. "
            "Make another one (python -m qerl_recipes.starting_model OUT --seed 1) or use the shipped one"
        )
    return {"greedy": of_itself, "step_by_step": thinking}


def make(out: str | Path, seed: int = 1, steps: int = STEPS) -> dict[str, float]:
    """Train a starting model and save it in BF16 with its tokenizer; returns its accuracies on held-out problems.

    Nothing is written if the model is not worth learning from.
    """
    model = new_model(seed)
    train(model, seed, steps)
    model.to(torch.bfloat16)
    measured = check_worth_learning(model, running_sum.held_out())
    model.save_pretrained(out)
    running_sum.tokenizer().save_pretrained(out)
    return measured


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m qerl_recipes.starting_model", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    print(json.dumps(make(options.out, options.seed, options.steps)))


if __name__ == "__main__":
    main()
