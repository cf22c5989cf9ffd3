"""Teach a model to write chain sums out, so that reinforcement learning has something to reinforce:

    python -m qerl_recipes.demo.warm_start --config recipes/SmolLM2-135M-Instruct/grpo/steps_nvfp4_lora.yaml BASE OUT

This is a short supervised training of all weights on worked answers, before quantization and the same for every arm.
The worked problems include neither the recipe's training problems nor its held-out ones.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import SFTConfig, SFTTrainer

from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.recipe.configs import ScriptArguments, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import prompts, reasoning_gym

STEPS, BATCH, LEARNING_RATE = 60, 8, 2e-4
TASK = "chain_sum"  # the only task whose answers can be worked out here
TEXTS = "worked_answers.jsonl"
SEED_DISTANCE = 2_000_003  # added to dataset_seed, so that worked problems have a seed of their own


def worked(expression: str) -> str:
    """Work a chain of + and - out, one line per operation and one with the answer; else raise ValueError."""
    value, *rest = expression.split()
    total, lines = int(value), []
    if len(rest) % 2 or any(sign not in "+-" for sign in rest[::2]):
        raise ValueError(f"{expression!r} is no chain of whole numbers with + and - between them")
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join([*lines, f"Answer: {total}"])


def examples(script: ScriptArguments, count: int) -> Dataset:
    """Return ``count`` new conversations with worked answers; raise ConfigError for another task, or too few."""
    if script.dataset_name != "reasoning_gym" or script.dataset_config != TASK:
        raise ConfigError(f"only {TASK} of reasoning_gym is worked out here; set dataset_config: {TASK}")
    used = {prompt for part in reasoning_gym.load(script) for prompt in part["prompt"]}
    task = reasoning_gym.problems(TASK, 4 * count, script.dataset_seed + SEED_DISTANCE, script.dataset_kwargs)
    fresh = [entry for entry in task if entry["question"] not in used][:count]
    if len(fresh) < count:
        raise ConfigError(f"the task has only {len(fresh)} problems besides the recipe's own, and {count} are wanted")
    system = [] if script.system_prompt is None else [{"role": "system", "content": script.system_prompt}]
    return Dataset.from_dict(
        {
            "prompt": [[*system, {"role": "user", "content": entry["question"]}] for entry in fresh],
            "completion": [
                [{"role": "assistant", "content": worked(entry["metadata"]["expression"])}] for entry in fresh
            ],
        }
    )


def texts(data: Dataset, tokenizer: Any) -> str:
    """Return the conversations of ``examples`` as JSON lines with a key "text", for `qerl quantize --calibration`."""
    rows = zip(data["prompt"], data["completion"], strict=True)
    conversations = (tokenizer.apply_chat_template([*asked, *answered], tokenize=False) for asked, answered in rows)
    return "".join(json.dumps({"text": text}) + "\n" for text in conversations)


def make(recipe: str | Path, base: str, out: Path, *, steps: int = STEPS, seed: int = 0) -> dict[str, float]:
    """Train ``base``, save it in ``out``, which must be empty, with its conversations; return steps and last loss."""
    script, training, _ = parse(["--config", str(recipe)])
    data = examples(script, steps * BATCH)
    folder = local_folder(base)
    tokenizer = prompts.tokenizer(folder, training)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    is_cpu = not torch.cuda.is_available()
    with whole_folder(out, overwrite=False, proof="config.json") as partial, tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            warmup_steps=steps // 10,
            lr_scheduler_type="cosine",
            bf16=True,
            use_cpu=is_cpu,
            gradient_checkpointing=False,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to="none",
            seed=seed,
        )
        trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        model.to(torch.bfloat16).save_pretrained(partial)
        GenerationConfig.from_pretrained(folder).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / TEXTS).write_text(texts(data, tokenizer), encoding="utf-8")
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"steps": steps, "loss": losses[-1]}


def main(argv: Sequence[str] | None = None) -> None:
    program = "python -m qerl_recipes.demo.warm_start"
    parser = argparse.ArgumentParser(prog=program, description="Teach a model to write chain sums out.")
    parser.add_argument("--config", required=True, help="recipe with the task and the system prompt")
    parser.add_argument("base", help="BF16 checkpoint: a folder or a model id")
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {BATCH} worked answers each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    print(json.dumps(make(options.config, options.base, options.out, steps=options.steps, seed=options.seed)))


if __name__ == "__main__":
    main()
