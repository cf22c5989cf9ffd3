"""reasoning-gym: generated problems of a hundred tasks, each scored by the task's own verifier; needs no network."""

import functools
import json
from typing import Any

from datasets import Dataset

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.answers import answer_in

DEFAULT_TASK = "chain_sum"
DEFAULT_SIZE = 1000
HELD_OUT, MOST_TRIES = 1000, 4000  # different problems, and how many are generated at most to find them
HELD_OUT_SEED_DISTANCE = 1_000_003  # held-out problems come from a seed of their own


@functools.lru_cache(maxsize=8)
def _task(specification: str) -> Any:
    """The generator that a specification (JSON) describes."""
    import reasoning_gym

    spec = json.loads(specification)
    try:
        return reasoning_gym.create_dataset(spec["task"], size=spec["size"], seed=spec["seed"], **spec["options"])
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning_gym: task {spec['task']!r} with dataset_kwargs {spec['options']} cannot be generated: {error}; "
            "dataset_config names the task, dataset_kwargs holds its own options"
        ) from error


def problems(task: str, size: int, seed: int, options: Any = None) -> Any:
    """reasoning-gym's own data set: a sequence of ``{"question", "answer", "metadata"}``. Raises ConfigError."""
    return _task(_specification(task, size, seed, options))


def _specification(task: str, size: int, seed: int, options: Any) -> str:
    return json.dumps({"task": task, "size": size, "seed": seed, "options": options or {}}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _entry(specification: str, index: int) -> dict[str, Any]:
    return _task(specification)[index]


def _table(specification: str, entries: dict[int, dict[str, Any]]) -> Dataset:
    """``entries`` by their index in the task."""
    return Dataset.from_dict(
        {
            "prompt": [entry["question"] for entry in entries.values()],
            "answer": [str(entry["answer"]) for entry in entries.values()],
            "reasoning_gym": [json.dumps({"specification": specification, "index": i}) for i in entries],
        }
    )


def _generate(specification: str) -> Dataset:
    return _table(specification, {i: _entry(specification, i) for i in range(len(_task(specification)))})


def _different(specification: str, count: int) -> Dataset:
    """The first ``count`` problems that differ; of fewer, a quarter: the rest is to be trained on."""
    found: dict[str, int] = {}  # question -> index
    for i in range(len(_task(specification))):
        found.setdefault(_entry(specification, i)["question"], i)
        if len(found) == count:
            break
    kept = list(found.values())[: count if len(found) == count else len(found) // 4]
    return _table(specification, {i: _entry(specification, i) for i in kept})


def load(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """``dataset_size`` problems of the task ``dataset_config`` from ``dataset_seed``, and 1000 held-out ones,
    all different; fewer where the task has not so many.

    ``dataset_kwargs`` are the task's own options. Columns: ``prompt``, ``answer`` and ``reasoning_gym``, from which the
    reward of that name finds the problem again. A held-out prompt never appears in training.
    """
    task, options = script.dataset_config or DEFAULT_TASK, script.dataset_kwargs
    train = _generate(_specification(task, script.dataset_size or DEFAULT_SIZE, script.dataset_seed, options))
    other_seed = script.dataset_seed + HELD_OUT_SEED_DISTANCE
    held_out = _different(_specification(task, MOST_TRIES, other_seed, options), HELD_OUT)
    seen = set(held_out["prompt"])
    return train.select([i for i, prompt in enumerate(train["prompt"]) if prompt not in seen]), held_out


def scores(completions: list[str], reasoning_gym: list[str], **columns: Any) -> list[float]:
    """The task's own score (0 to 1) of what stands in the last answer block or box; 0 without one."""
    found = []
    for text, reference in zip(completions, reasoning_gym, strict=True):
        problem = json.loads(reference)
        task, entry = _task(problem["specification"]), _entry(problem["specification"], problem["index"])
        answer = answer_in(text)
        found.append(0.0 if answer is None else float(task.score_answer(answer, entry)))
    return found
