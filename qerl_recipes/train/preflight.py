"""Describe a run once, before anything loads: what engine, model and trainer are built from has been checked here.

``check`` refuses what can be refused without the model. ``settle`` needs the model's folder, which may be downloaded,
and the lock on the run's output folder; it refuses what else does not fit.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from peft import LoraConfig, PeftConfig
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import get_peft_config

from qerl_recipes.files import base_model, run_state
from qerl_recipes.files.adapter import CONFIG, NORMS, AdapterFolder, open_adapter
from qerl_recipes.files.metrics_file import FILE, read_metrics
from qerl_recipes.files.run_state import CheckpointMismatch, Run, recorded
from qerl_recipes.hooks import Reward, collect, unknown_names
from qerl_recipes.machine.gpu import Gpu
from qerl_recipes.machine.requirements import lacking
from qerl_recipes.memory import plan as memory_plan
from qerl_recipes.memory.plan import Plan
from qerl_recipes.memory.sizes import adapted, measure
from qerl_recipes.model import families, shared
from qerl_recipes.recipe import checks
from qerl_recipes.recipe.batches import AS_MANY_AS_FIT, FAST_TOKENS
from qerl_recipes.recipe.configs import AS_FEW_AS_FIT, GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_recipes.recipe.server_keys import server_problems
from qerl_recipes.tasks import environments, prompts, rewards
from qerl_recipes.tasks.environments import Interaction
from qerl_recipes.train.dynamic_sampling import TOTAL

IMAGES = {"image", "images"}  # columns from which TRL takes pictures
TARGETS = "lora_target_modules"
# recipe key -> key of adapter_config.json and PEFT's default
ADAPTER_KEYS = {
    "lora_r": ("r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "use_rslora": ("use_rslora", False),
}


@dataclass(frozen=True)
class Checked:
    """Hold a recipe that passed ``check``, and what was read on the way.

    ``config`` is the model's config.json, None if it has yet to be downloaded. ``rows`` are the training and held-out
    problems before they are tokenized. ``start`` is the adapter that training starts from. ``plan`` is None on a CPU.
    """

    script: ScriptArguments
    training: GRPOConfig
    model: ModelConfig
    config: Mapping[str, Any] | None
    rows: tuple[Dataset, Dataset | None]
    rewards: list[Reward]
    interaction: Interaction
    start: AdapterFolder | None
    plan: Plan | None


@dataclass(frozen=True)
class Preflight(Checked):
    """Hold all that a run is built from: also base folder, prompts, adapter, and what checkpoints record."""

    config: Mapping[str, Any]
    base: Path
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset | None
    adapter: PeftConfig
    run: Run
    recorded: dict[str, Any]


def make(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> Preflight:
    """Return the description of a new run without a memory plan; raise what ``check`` and ``settle`` raise."""
    return settle(check(script, training, model))


def check(script: ScriptArguments, training: GRPOConfig, model: ModelConfig, gpu: Gpu | None = None) -> Checked:
    """Refuse a recipe that cannot run as it is written; nothing has been loaded or written when this raises.

    ``gpu`` is the GPU that the memory is planned for; None makes no plan. Replaces ``recompute_layers: -1`` and
    ``pack_tokens: -1`` in ``training``. Raises ConfigError with one line for each thing that is wrong, and ValueError
    for a run that does not fit the GPU.
    """
    problems = [*checks.problems(script, training, model), *server_problems(training), *unknown_names(training)]
    problems += lacking(training, model)
    if training.share_weights and (reason := shared.obstacle(training)):
        problems.append(f"share_weights: {reason}; use share_weights: false")
    start = _open_start(script, training, problems)
    config = _known_config(model, problems)
    if config is not None:
        problems += families.misfits(config, script, training, model)
    offered = collect("qerl_tools"), collect("qerl_environments")
    interaction = environments.resolve(script, training.max_tool_seconds, *offered, problems)
    functions = _resolve_rewards(script, training, interaction, problems)
    rows = _read_rows(script, training, functions, interaction, problems)
    if problems or rows is None:
        raise ConfigError(f"{CANNOT_RUN}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    for line in (*checks.without_effect(training), *rewards.without_effect(script)):
        warnings.warn(line, stacklevel=2)
    folder = str(model.model_name_or_path)
    if training.push_to_hub and Path(folder).is_dir() and base_model.hub_name(folder) == folder:
        warnings.warn(
            f"push_to_hub: what is pushed will name the base {Path(folder).absolute().name}, as its folder here, where "
            "PEFT does not find it; qerl quantize notes the hub's name for a model that it takes from there",
            stacklevel=2,
        )
    plan = None if gpu is None else memory_plan.make(script, training, model, gpu=gpu, config=config)
    if plan is not None:
        plan.check()
    if training.recompute_layers == AS_FEW_AS_FIT:
        training.recompute_layers = None if plan is None else plan.checkpointed
    if training.pack_tokens == AS_MANY_AS_FIT:
        training.pack_tokens = FAST_TOKENS if plan is None else plan.pack_tokens
    return Checked(script, training, model, config, rows, list(functions.values()), interaction, start, plan)


class ResumePoint(NamedTuple):
    """Hold a run's checkpoint, its state, whether it is of the last step, and the lines of metrics.jsonl up to it."""

    folder: Path
    state: run_state.State
    is_finished: bool
    metrics: list[dict[str, Any]]


def resume_point(training: GRPOConfig, recipe: Mapping[str, Any]) -> ResumePoint | None:
    """Return where the run goes on; None for a new run. Hold the lock on its output folder.

    Raises CheckpointMismatch for a folder that is not whole, is of another recipe (``run_state.recorded``), or ended in
    the middle of a rollout, and where a new run would mix its files with those of an earlier one. Raises ValueError for
    a damaged line of metrics.jsonl, which the run would cut back.
    """
    if (folder := run_state.starting_point(training.output_dir, training.resume_from_checkpoint)) is None:
        return None
    state, served = run_state.read_state(folder), checks.steps_per_rollout(training)
    run_state.check_recipe(state, recipe, folder)
    metrics = [line for line in read_metrics(Path(training.output_dir) / FILE) if line["step"] <= state.step]
    reached = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    is_finished = reached.epoch is not None and reached.epoch > training.num_train_epochs - 1e-6
    if training.max_steps > 0:
        is_finished = reached.global_step >= training.max_steps
    if state.step % served and not is_finished:
        raise CheckpointMismatch(
            f"{folder} is of a run that ended in the middle of a rollout, each of which serves {served} steps, and "
            f"cannot be made longer from there; resume from an earlier checkpoint. {run_state.ANOTHER_RUN}"
        )
    return ResumePoint(folder, state, is_finished, metrics)


def settle(checked: Checked, resume: ResumePoint | None = None) -> Preflight:
    """Return the whole description of a run; the model may be downloaded, and nothing has been loaded.

    Raises ConfigError for what does not fit the recipe, and CheckpointMismatch for another run's checkpoint or base.
    """
    script, training, model, start = checked.script, checked.training, checked.model, checked.start
    name = str(model.model_name_or_path)
    base, config = base_model.local_folder(name, model.model_revision), checked.config
    if config is None or not Path(name).is_dir():  # it has just arrived, or only a copy of its sizes was known
        config = base_model.read_config(base)
        if misfits := list(families.misfits(config, script, training, model)):
            raise ConfigError("\n".join(misfits))
    tokenizer = prompts.tokenizer(base, training, padding_side="left", truncation_side="left")
    options = environments.rendering(tokenizer, training, checked.interaction)
    train, held_out = prompts.load(script, tokenizer, checked.rows, options, checked.interaction)
    environments.refuse_failing_resets(checked.interaction, train, training.seed)
    base_name = base_model.written_name(name, model.model_revision, base)
    run = run_state.describe(training, base, train, base_name, None if start is None else start.sha256())
    recipe, adapter, named_by = recorded(script, training, model), get_peft_config(model), TARGETS
    if start is not None:
        start.check_base(run.base_hash)
        named_by = f"adapter_name_or_path {start.path}"
        if model.names_adapter:
            _check_adapter(start, adapter.to_dict(), config, named_by)
        adapter = LoraConfig.from_pretrained(str(start.path))
    adapted(adapter.to_dict(), measure(config), named_by)  # PEFT would pass over a name that is no layer's
    if resume is not None:
        run_state.check_continues(resume.state, run, resume.folder)
        saved = open_adapter(resume.folder)
        saved.check_tensors()
        _check_adapter(saved, adapter.to_dict(), config, f"cannot resume from {resume.folder}")
    if training.eval_strategy == "no":
        held_out = None
    elif held_out is not None and (line := uneven_evaluation(training, len(held_out))) is not None:
        warnings.warn(line, stacklevel=2)
    positions = families.most_positions(config)
    data = {"training": train, "held-out": held_out}
    prompts.refuse_long_prompts(data, tokenizer, script, training, positions, options, checked.interaction)
    own = {"config": config, "base": base, "tokenizer": tokenizer, "train": train, "held_out": held_out}
    return Preflight(**{**vars(checked), **own}, adapter=adapter, run=run, recorded=recipe)


def uneven_evaluation(training: GRPOConfig, problems: int) -> str | None:
    """Say why the means of an evaluation on ``problems`` would be wrong, or None: TRL averages over batches."""
    group, processes = training.num_generations_eval or training.num_generations, training.world_size
    size, completions = training.per_device_eval_batch_size, problems * group
    if completions % (size * processes) == 0:
        return None
    whole = [n for n in range(size, 0, -1) if completions % (n * processes) == 0 == n * processes % group]
    more = ", and is filled up with problems that were counted already" if processes > 1 else ""
    change = f"per_device_eval_batch_size: {whole[0]}" if whole else f"a multiple of {processes} held-out problems"
    return (
        f"an evaluation takes {problems} held-out problems x {group} completions, {size * processes} at a time: the "
        f"last batch is smaller and counts as much as any other{more}; use {change}"
    )


def _open_start(script: ScriptArguments, training: GRPOConfig, problems: list[str]) -> AdapterFolder | None:
    """Return the adapter that training starts from, None for a new one; add to ``problems`` what is wrong with it."""
    if script.adapter_name_or_path is None:
        return None
    try:
        start = open_adapter(script.adapter_name_or_path)
        start.check_plain()
        start.check_tensors()
    except ValueError as error:
        problems.append(f"adapter_name_or_path: {error}")
        return None
    file = start.path / CONFIG
    if start.config.get("lora_dropout"):
        problems.append(
            f"adapter_name_or_path: {file} has lora_dropout: {start.config['lora_dropout']}, which would drop "
            "activations in the trainer only; set it to 0 there, which leaves the weights as they are"
        )
    if start.config["lora_alpha"] == 0:
        problems.append(f"adapter_name_or_path: {file}: lora_alpha: 0 {checks.WITHOUT_SCALE}; begin from another")
    if training.beta and (start.path / NORMS).is_file():
        problems.append(
            f"beta needs a reference without trained norms, and {script.adapter_name_or_path} has some; use beta: 0"
        )
    return start


def _known_config(model: ModelConfig, problems: list[str]) -> Mapping[str, Any] | None:
    """Return the model's config.json, None if it has to be downloaded; add to ``problems`` that there is none."""
    name = model.model_name_or_path
    if name is None:
        problems.append("model_name_or_path is missing")
    elif name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        problems.append(f"model_name_or_path: there is no folder {name}")
    else:
        try:
            return base_model.known_config(name, model.model_revision)
        except (OSError, ValueError) as error:
            problems.append(f"model_name_or_path: {name} has no readable config.json ({error})")
    return None


def _resolve_rewards(
    script: ScriptArguments, training: GRPOConfig, interaction: Interaction, problems: list[str]
) -> dict[str, Reward]:
    """Return the reward functions by their names in the recipe; add to ``problems`` what is wrong with these keys."""
    names, weights = script.reward_funcs, training.reward_weights
    if not names and not interaction.rewards() and not interaction.lacks_some:
        has_none = ", and no environment has a get_reward" if interaction.environments else ""
        problems.append(f"reward_funcs is empty{has_none}")
    elif weights is not None and len(weights) != len(names):
        problems.append(
            f"reward_weights has {len(weights)} numbers for {len(names)} reward_funcs; give one each, as "
            f"--reward_weights {' '.join(['1.0'] * len(names))}"
        )
    functions: dict[str, Reward] = {}
    for name in names:
        try:
            functions[name] = rewards.resolve(name, script, collect("qerl_rewards"))
        except ValueError as error:
            problems.append(str(error))
    own_names = [getattr(functions[name], "__name__", "") for name in names if name in functions]
    own_names += interaction.rewards()
    if twice := sorted({name for name in own_names if own_names.count(name) > 1}):
        problems.append(
            f"reward_funcs: {', '.join(twice)} is the name of several, whose means would be mixed in "
            f"rewards/{twice[0]}/mean; list each once, and give functions of your own names (__name__) that differ"
        )
    metric = training.dynamic_sampling_metric
    if metric not in (None, TOTAL, *own_names) and len(functions) == len(names):
        problems.append(
            f"dynamic_sampling_metric: {metric!r} is not one of the rewards: {', '.join([*own_names, TOTAL])}"
        )
    return functions


def _read_rows(
    script: ScriptArguments,
    training: GRPOConfig,
    functions: Mapping[str, Reward],
    interaction: Interaction,
    problems: list[str],
) -> tuple[Dataset, Dataset | None] | None:
    """Return the training and held-out problems of a recipe; add to ``problems`` what is wrong with them."""
    is_owned = script.dataset_name is None and isinstance(script.environments, str)
    needed = training.generation_batch_size // training.num_generations
    try:
        if is_owned:
            train, held_out = prompts.of_environment(script, needed), None
        else:
            acts = script.environments is not None
            train, held_out = prompts.read(script, collect("qerl_datasets"), may_lack_prompts=acts)
    except ConfigError as error:
        problems.append(str(error))
        return None
    evaluates = training.eval_strategy != "no"
    for split, rows in {"training": train, "held-out": held_out if evaluates else None}.items():
        if rows is not None:
            problems += _column_problems(split, rows, functions)
            names = rows[environments.COLUMN] if environments.COLUMN in rows.column_names else ()
            problems += environments.row_problems(interaction, split, rows.column_names, names)
    if is_owned and training.max_steps < 1:
        problems.append("an environment without dataset_name has no epochs; say how long to train with max_steps")
    if len(train) < needed:
        by_trl = "per_device_train_batch_size, or gradient_accumulation_steps,"
        keys = "generation_batch_size" if training.splits_by_tokens else by_trl
        problems.append(
            f"a rollout takes {needed} prompts and the data have {len(train)}; lower {keys} to at most "
            f"{len(train) * training.num_generations} completions a rollout (now {training.generation_batch_size})"
        )
    if evaluates and held_out is None:
        problems.append(
            f"eval_strategy: {training.eval_strategy.value} needs held-out problems, and there is no split "
            f"{script.dataset_test_split!r}; give a folder with train.jsonl and test.jsonl as dataset_name, name "
            "another dataset_test_split, or cut one split in two: dataset_train_split: 'train[:90%]' and "
            "dataset_test_split: 'train[90%:]'. Without evaluation: eval_strategy: 'no'"
        )
    return train, held_out


def _column_problems(split: str, rows: Dataset, functions: Mapping[str, Reward]) -> Iterator[str]:
    """Yield a line for each column that TRL cannot pass to a reward or takes for pictures, or that a reward lacks."""

    def rename(old: str, new: str) -> str:
        return f"--dataset_kwargs '{json.dumps({'columns': {old: new}})}'"

    columns = set(rows.column_names)
    for name in sorted(columns & (rewards.PASSED_BY_TRL | IMAGES)):
        why = "is read as pictures, and a policy here reads text" if name in IMAGES else "is what TRL calls its own"
        way_out = f"remove it, or rename it (a file of your own: {rename(name, f'my_{name}')})"
        yield f"the column {name} of the {split} data {why}; {way_out}"
    for name, reward in functions.items():
        if missing := sorted(rewards.required_columns(reward) - columns):
            yield (
                f"reward {name} reads the column {', '.join(missing)}, which the {split} data lack; they have "
                f"{', '.join(sorted(columns))}. To rename one: {rename('OLD', missing[0])}"
            )
        yield from rewards.answer_problems(name, rows, split)


def _check_adapter(
    existing: AdapterFolder, expected: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> None:
    """Raise ConfigError, beginning with ``source``, for each key in which an adapter is not the ``expected`` one."""
    differences = [
        f"{key} is {expected.get(name, default)} and the adapter's {existing.config.get(name, default)}"
        for key, (name, default) in ADAPTER_KEYS.items()
        if expected.get(name, default) != existing.config.get(name, default)
    ]
    size = measure(config)
    wanted, trained = adapted(expected, size, TARGETS), adapted(existing.config, size, source)
    if wanted != trained:
        kinds = sorted({linear.name.rpartition(".")[2] for linear in trained})
        differences.append(f"{TARGETS} has {len(wanted)} layers and the adapter {len(trained)} ({', '.join(kinds)})")
    if differences:
        raise ConfigError(
            f"{source}: {'; '.join(differences)}. Give these keys the adapter's values, name an adapter that has them "
            "as adapter_name_or_path, or train a new one"
        )
