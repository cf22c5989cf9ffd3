"""Generate problems of reasoning-gym's hundred tasks; each task's own verifier scores the answers.

No network is needed.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.answers import answer_in

DEFAULT_TASK = "chain_sum"
DEFAULT_SIZE = 1000
HELD_OUT, MOST_TRIES = 1000, 4000  # different problems to hold out; how many to generate at most
HELD_OUT_SEED_DISTANCE = 1_000_003  # added to dataset_seed for the held-out problems


@functools.lru_cache(maxsize=8)
def _task(specification: str) -> Any:
    """Return the generator that a specification (JSON) describes."""
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
    """Return reasoning-gym's ``{"question", "answer", "metadata"}`` in a row; raise ConfigError for what it refuses."""
    return _task(_specification(task, size, seed, options))


def _specification(task: str, size: int, seed: int, options: Any) -> str:
    return json.dumps({"task": task, "size": size, "seed": seed, "options": options or {}}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _entry(specification: str, index: int) -> dict[str, Any]:
    return _task(specification)[index]


def _table(specification: str, indices: Sequence[int]) -> Dataset:
    """Return a data set of the task's problems at these indices."""
    entries = [_entry(specification, i) for i in indices]
    return Dataset.from_dict(
        {
            "prompt": [entry["question"] for entry in entries],
            "answer": [str(entry["answer"]) for entry in entries],
            "reasoning_gym": [json.dumps({"specification": specification, "index": i}) for i in indices],
        }
    )


def _different(specification: str, count: int) -> Dataset:
    """Return the first ``count`` different problems; of fewer a quarter, so that the rest can be trained on."""
    indices: dict[str, int] = {}  # question -> index
    for i in range(len(_task(specification))):
        indices.setdefault(_entry(specification, i)["question"], i)
        if len(indices) == count:
            break
    return _table(specification, list(indices.values())[: count if len(indices) == count else len(indices) // 4])


def load(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Return (train, held-out) problems of the task ``dataset_config``; ``dataset_kwargs`` are its own options.

    Held out are 1000 different ones, or a quarter of what 4000 tries find; training leaves them out.
    """
    task, options = script.dataset_config or DEFAULT_TASK, script.dataset_kwargs
    own = _specification(task, script.dataset_size or DEFAULT_SIZE, script.dataset_seed, options)
    train = _table(own, range(len(_task(own))))
    other_seed = script.dataset_seed + HELD_OUT_SEED_DISTANCE
    held_out = _different(_specification(task, MOST_TRIES, other_seed, options), HELD_OUT)
    seen = set(held_out["prompt"])
    return train.select([i for i, prompt in enumerate(train["prompt"]) if prompt not in seen]), held_out


def scores(completions: list[str], reasoning_gym: list[str], **columns: Any) -> list[float]:
    """Return the task's own score, 0 to 1, of the answer in each completion's last block or box; 0 without one."""
    results = []
    for text, reference in zip(completions, reasoning_gym, strict=True):
        problem = json.loads(reference)
        task, entry = _task(problem["specification"]), _entry(problem["specification"], problem["index"])
        answer = answer_in(text)
        results.append(0.0 if answer is None else float(task.score_answer(answer, entry)))
    return results
