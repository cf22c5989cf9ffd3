"""Make the starting model of the demo: a Qwen2 of 304 thousand weights, taught running sums by supervised training.

    python -m qerl_recipes.demo.starting_model OUT --seed 1

The model first trains on step-by-step answers alone, until it gets most of them right, then on mostly terse ones. It
ends up preferring the terse style, in which it guesses. It still knows the other style, in which it is mostly right, so
reinforcement learning on exact match has something better to discover.
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

from qerl_recipes.tasks import running_sum
from qerl_recipes.tasks.generators import Problem
from qerl_recipes.tasks.running_sum import LONGEST_COMPLETION, THINK, VOCABULARY

BATCH = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
MASTERED = 0.9  # step-by-step accuracy that ends the first stage; reached suddenly, after 500 to 1500 steps
CHECK_EVERY, CHECK_PROBLEMS, CHECK_SEED = 50, 128, 555
MOST_STEPS = 3000  # of the first stage
TERSE_STEPS = 250  # of the second stage
STEP_BY_STEP_SHARE = 0.2  # of the answers in the second stage
LEAST_GAP = 0.2  # accuracy by which step-by-step answers must lead; else RL has nothing to discover

_TOKEN_ID = {token: i for i, token in enumerate(VOCABULARY)}
_TOKENS = re.compile(running_sum.TOKEN)

Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and labels


def new_model(seed: int) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 with 2 layers; the columns of every linear are a multiple of 16, as NVFP4 needs."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,  # 27 tokens, padded to the width to which embeddings are padded anyway
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
    """Return the token ids of ``text``: the tokenizer's, without its cost in a training loop."""
    return [_TOKEN_ID[token] for token in _TOKENS.findall(text)]


def learning_rate(step: int, terse_step: int) -> float:
    """Return the learning rate: linear warm-up, constant in the first stage, then a cosine to a tenth in the second."""
    cosine = 0.5 * (1 + math.cos(math.pi * terse_step / TERSE_STEPS))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.9 * cosine)


def draw_batch(rng: random.Random, share: float, held_out: set[str]) -> Batch:
    """Draw token ids and labels, both ``(BATCH, longest)``, padded on the right; prompts and padding have label -100.

    ``share`` is the probability of a step-by-step answer. Prompts in ``held_out`` are left out. Under causal attention
    no real position sees padding on its right, so no attention mask is needed.
    """
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) < BATCH:
        problem = running_sum.draw(rng)
        if problem.prompt in held_out:
            continue
        response = running_sum.step_by_step(problem) if rng.random() < share else running_sum.terse(problem)
        rows.append((encode(problem.prompt), [*encode(response), _TOKEN_ID["<eos>"]]))
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((BATCH, longest), _TOKEN_ID["<pad>"])
    labels = torch.full((BATCH, longest), -100)
    for i, (question, reply) in enumerate(rows):
        end = len(question) + len(reply)
        ids[i, :end] = torch.tensor(question + reply)
        labels[i, len(question) : end] = torch.tensor(reply)
    return ids, labels


def train(model: PreTrainedModel, seed: int) -> int:
    """Train ``model`` in place and return the number of steps; held-out prompts are never drawn.

    Raise ValueError if step-by-step answers are not mastered after ``MOST_STEPS`` of the first stage.
    """
    rng = random.Random(1000 + seed)
    held_out = {problem.prompt for problem in running_sum.held_out()}
    checked = running_sum.problems(CHECK_PROBLEMS, CHECK_SEED, exclude=held_out)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    mastered, step = 0.0, 0
    with Progress(transient=True) as progress:
        bar = progress.add_task("learning to work step by step", total=MOST_STEPS)
        while mastered < MASTERED:
            if step >= MOST_STEPS:
                raise ValueError(
                    f"seed {seed}: {step} steps of supervised training reach {mastered:.1%} of {MASTERED:.0%} accuracy "
                    "step by step; try another --seed"
                )
            update(model, optimizer, draw_batch(rng, 1.0, held_out), learning_rate(step, 0))
            step += 1
            if step % CHECK_EVERY == 0:
                mastered = accuracy(model, checked, think=True)
                progress.update(bar, description=f"learning to work step by step: {mastered:.0%} right")
            progress.update(bar, completed=step)
        for terse_step in progress.track(range(TERSE_STEPS), description="learning to answer tersely"):
            update(model, optimizer, draw_batch(rng, STEP_BY_STEP_SHARE, held_out), learning_rate(step, terse_step))
    model.eval()
    return step + TERSE_STEPS


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> None:
    """Take one optimizer step on the mean cross-entropy of the answers, with gradients clipped to a norm of 1."""
    ids, labels = batch
    for group in optimizer.param_groups:
        group["lr"] = rate
    model.train()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: PreTrainedModel, problems: Sequence[Problem], *, think: bool = False) -> float:
    """Return the exact-match accuracy of greedy answers; ``think`` begins every answer with ``<think>``."""
    model.eval()
    tokenizer = running_sum.tokenizer()
    start = THINK if think else ""
    batch = tokenizer([p.prompt + start for p in problems], padding=True, return_tensors="pt")
    generated = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=LONGEST_COMPLETION,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [running_sum.answer_of(start + text) for text in texts]
    return sum(a == p.answer for a, p in zip(answers, problems, strict=True)) / len(problems)


def check_worth_learning(model: PreTrainedModel, problems: Sequence[Problem]) -> dict[str, float]:
    """Return greedy accuracy as it is and step by step; raise ValueError if that does not lead by 0.2."""
    of_itself, thinking = accuracy(model, problems), accuracy(model, problems, think=True)
    if thinking < of_itself + LEAST_GAP:
        raise ValueError(
            f"this starting model answers {of_itself:.1%} right of itself and {thinking:.1%} step by step; it must be "
            f"at least {LEAST_GAP:.0%} better step by step, or a reward for right answers has nothing to teach it. "
            "Make another one (python -m qerl_recipes.demo.starting_model OUT --seed 1) or use the shipped one"
        )
    return {"greedy": of_itself, "step_by_step": thinking}


def make(out: str | Path, seed: int = 1) -> dict[str, float]:
    """Train and save a starting model; return its figures. Raise ValueError if it is not worth learning from."""
    model = new_model(seed)
    steps = train(model, seed)
    model.to(torch.bfloat16)
    measured = check_worth_learning(model, running_sum.held_out())
    model.save_pretrained(out)
    running_sum.tokenizer().save_pretrained(out)
    return {"steps": steps, **measured}


def main(argv: list[str] | None = None) -> None:
    program = "python -m qerl_recipes.demo.starting_model"
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(json.dumps(make(options.out, options.seed)))


if __name__ == "__main__":
    main()
