"""Relate an evaluation to the training run that it judges: take over its settings, and name what differs."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qerl_recipes.evaluate import request
from qerl_recipes.evaluate.request import Sampling, has_episodes, read_problems
from qerl_recipes.files.adapter import TEMPLATE, AdapterFolder
from qerl_recipes.files.json_files import shown

# reward of a recipe -> the local task that judges like it; the first reward of this table that a recipe uses counts
JUDGED_BY = {
    "exact_answer": request.EXACT,
    "last_number": request.NUMBER,
    **dict.fromkeys(("accuracy", "dapo_score", "cosine", "length"), request.ACCURACY),
}
# data set of a recipe -> the task that tests what it teaches; a local file is its own task
TASK_OF = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "running_sum": "running_sum",
    "bigmath": "math_500",
    "open-r1/Big-Math-RL-Verified-Processed": "math_500",
    "dapo_math_17k": "math_500",
    "open-r1/DAPO-Math-17k-Processed": "math_500",
}
HELD_OUT = "held_out.jsonl"  # of a run's folder: the problems that its data held out, where no other task has them
UNKNOWN, PROBLEMS = "TASKS", "PROBLEMS.jsonl"
# keys of a recipe that say how the policy acts, wherever it acts, and those that belong to the run's own episodes
EVERYWHERE = ("response_template", "max_tool_calling_iterations", "max_tool_tokens", "max_tool_seconds")
ACTING = (
    *("tools", "environments", "environment_kwargs", "environment_python"),
    *EVERYWHERE,
    *("reward_funcs", "reward_weights"),
)
# Sampling parameters of a recipe that an evaluation does not take over. Those besides FIXED only change the text made
# from the tokens; the trainer decodes tokens itself, without them.
NOT_TAKEN = {*request.FIXED, *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")}

S = TypeVar("S", bound=Sampling)


def taken_over(sampling: S, adapter: AdapterFolder) -> tuple[S, list[str]]:
    """Fill the open choices of ``sampling`` from the adapter's training; return the copy, and what was filled."""
    in_training = _in_training(sampling, adapter)
    filled = {key: value for key, value in in_training.items() if value is not None and getattr(sampling, key) is None}
    described = [key if key in ("system_prompt", "chat_template") else f"{key} {filled[key]}" for key in filled]
    return sampling.model_copy(update=filled), described


def overridden(sampling: Sampling, adapter: AdapterFolder) -> list[str]:
    """Return a text for each choice that ``sampling`` makes otherwise than the adapter's training."""
    lines = []
    if sampling.use_chat_template is False and (adapter.path / TEMPLATE).is_file():
        lines.append("no chat template")
    for key, theirs in _in_training(sampling, adapter).items():
        mine = getattr(sampling, key)
        if mine is not None and (mine or None) != theirs:
            lines.append(f"{key} {shown(mine or 'none')}, there {shown(theirs or 'none')}")
    return lines


def _in_training(sampling: Sampling, adapter: AdapterFolder) -> dict[str, Any]:
    """Return what training settled of the options of ``sampling``, None for what it had not."""
    file = adapter.path / TEMPLATE
    template = file.read_text(encoding="utf-8") if file.is_file() else None
    return settled(adapter.recipe, sampling.temperature, sampling.use_chat_template is not False, template)


def settled(
    recipe: Mapping[str, Any], temperature: float, renders: bool, template: str | None = None
) -> dict[str, Any]:
    """Return what a recipe settles of an evaluation at ``temperature``; ``renders`` says that it has a chat template.

    ``template`` is the one that training was given, None for that of the tokenizer.
    """
    chat = {"chat_template": template, "chat_template_kwargs": recipe.get("chat_template_kwargs") or None}
    return {
        "system_prompt": recipe.get("system_prompt"),
        "max_new_tokens": recipe.get("max_completion_length"),
        **(chat if renders else {}),
        "generation_kwargs": sampling_parameters(recipe, temperature) or None,
    }


def sampling_parameters(recipe: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Return a recipe's other sampling parameters as ``generation_kwargs``; top_k and min_p only above 0."""
    recipe_kwargs = recipe.get("generation_kwargs") or {}
    kwargs = {key: value for key, value in recipe_kwargs.items() if key not in NOT_TAKEN}
    if kwargs.keys() & {"stop", "stop_token_ids"}:
        kwargs["include_stop_str_in_output"] = True  # in training, rewards see what ended the completion
    if recipe.get("repetition_penalty") not in (None, 1):
        kwargs["repetition_penalty"] = recipe["repetition_penalty"]
    if temperature > 0:
        kwargs |= {key: value for key in ("top_k", "min_p") if (value := recipe.get(key) or 0) > 0}
    if (regex := recipe.get("vllm_structured_outputs_regex")) is not None:
        kwargs["structured_outputs"] = {"regex": regex}
    return kwargs


def acting(recipe: Mapping[str, Any], tasks: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the keys of a recipe that say how its policy acts, as far as they have a part in ``tasks``."""
    acts = recipe.get("tools") or recipe.get("environments")
    is_own = tasks is None or any(acts_as_in(name, recipe) for name in tasks)
    return {key: recipe[key] for key in (ACTING if is_own else EVERYWHERE) if recipe.get(key)} if acts else {}


def acts_as_in(task: str, recipe: Mapping[str, Any]) -> bool:
    """Return True if the policy acts in ``task`` as in the run: with its tools, for its rewards."""
    trained, named = recipe.get("environments"), task.partition(":")[2]
    if task == request.TOOLS:
        return bool(recipe.get("tools")) and not trained
    is_trained = named in trained if isinstance(trained, dict) else named == trained
    return task.startswith(request.ENVIRONMENT) and is_trained


def without_actions(tasks: Sequence[str], recipe: Mapping[str, Any]) -> list[str]:
    """Return a text if the policy may act in training and not in some of ``tasks``."""
    names = ", ".join(name for name in tasks if not has_episodes(name))
    tools, environments = recipe.get("tools") or (), recipe.get("environments") or ()
    trained = [*tools, *([environments] if isinstance(environments, str) else environments)]
    return [f"no tools in {names}, there {', '.join(trained)}"] if names and trained else []


def warmer_or_colder(sampling: Sampling, recipe: Mapping[str, Any]) -> list[str]:
    """Return a text for temperature and top_p (if it has an effect) where they differ from training."""
    keys = ("temperature",) if sampling.temperature == 0 else ("temperature", "top_p")
    pairs = [(key, getattr(sampling, key), recipe.get(key)) for key in keys]
    return [f"{key} {mine:g}, there {theirs:g}" for key, mine, theirs in pairs if theirs not in (None, mine)]


def command(run: str | Path, state: Mapping[str, Any]) -> str:
    """Return the command that evaluates the run in ``run``; TASKS and PROBLEMS.jsonl stand for what is not known."""
    recipe = state.get("recipe") or {}
    words = ["qerl", "evaluate", str(state.get("base", "BASE")), "--adapter", str(run)]
    words += ["--quantization", str(state.get("quantization", "qerl_nvfp4")), "--tasks", _task_of(run, recipe)]
    if acting(recipe) and recipe.get("dataset_name") and not (Path(run) / HELD_OUT).is_file():
        words += ["--problems", PROBLEMS]
    return shlex.join([*words, "--output_dir", f"{run}/evaluation"])


def needs_held_out(run: str | Path, recipe: Mapping[str, Any]) -> bool:
    """Return True if a file ``HELD_OUT`` in the run's folder, and no other, would give ``command`` a task."""
    if acting(recipe):
        return bool(recipe.get("dataset_name"))  # without one, an environment has data of its own
    is_judged = not JUDGED_BY.keys().isdisjoint(recipe.get("reward_funcs") or ())
    return is_judged and _task_of(run, recipe) == UNKNOWN


def _task_of(run: str | Path, recipe: Mapping[str, Any]) -> str:
    """Return the task that tests what a run has learnt, judged as its reward; the word TASKS if none is known."""
    if environments := recipe.get("environments"):
        names = [environments] if isinstance(environments, str) else environments
        return ",".join(f"{request.ENVIRONMENT}{name}" for name in names)
    if recipe.get("tools"):
        return request.TOOLS
    dataset = recipe.get("dataset_name")
    if dataset in TASK_OF:
        return TASK_OF[dataset]
    rewards = recipe.get("reward_funcs") or ()
    judged = next((task for reward, task in JUDGED_BY.items() if reward in rewards), request.MATH)
    paths = () if dataset is None else (Path(dataset) / "test.jsonl", Path(dataset))
    for path in (*paths, Path(run) / HELD_OUT):
        try:
            read_problems(path)
        except (ValueError, OSError):
            continue
        return f"{judged}{path.absolute()}"
    return UNKNOWN


def is_of_training(task: str, recipe: Mapping[str, Any], problems: Path | None = None) -> bool:
    """Return True if a task, for episodes the file ``problems``, reads what the run was trained on."""
    file = Path(task.partition(":")[2]) if task.startswith(request.LOCAL) else problems if has_episodes(task) else None
    if file is None:
        return False
    trained_on = [recipe.get("dataset_name"), (recipe.get("dataset_kwargs") or {}).get("path")]
    places = [Path(place).resolve() for place in trained_on if place is not None]
    return any(file.resolve() in (place, place / "train.jsonl") for place in places)
