"""Measure how engine and trainer differ on the same tokens, and which part causes it: ``qerl doctor --logprobs RUN``.

The engine samples as the run does. Then engine and trainer compute the log-probabilities of these tokens again, with
parts switched on one by one. Each token has a delta: log p of the trainer minus log p of the engine. The stages are

    weights    the base alone, all tokens in one pass, temperature 1: the product with the frozen weights, and rounding
    adapter    the same with the adapter, and with the trained norms if there are any
    noise      the same with the noise: in the engine and, in noise mode both, in the trainer
    sampling   the log-probabilities that the tokens were drawn with, one at a time, at the run's temperature, top_p,
               top_k and min_p: logp_diff_mean and logp_diff_max of metrics.jsonl. A temperature other than 1 scales the
               differences above by 1 / temperature; what that adds is in this row

A part adds the delta of its stage minus that of the stage before. With tools and environments the tokens are those of
each episode's first turn.
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from trl.trainer.utils import pad

from qerl_recipes.files.adapter import AdapterFolder, open_adapter
from qerl_recipes.model import norms
from qerl_recipes.recipe.checks import narrowing
from qerl_recipes.recipe.configs import SERVER, GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import TOPICS
from qerl_recipes.recipe.server_keys import SERVER_KEYS
from qerl_recipes.rollout.episodes import begun
from qerl_recipes.tasks import prompts
from qerl_recipes.tasks.environments import COLUMN, Interaction, rendering
from qerl_recipes.train.checkpoints import load_adapter

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer

STAGES = ("weights", "adapter", "noise", "sampling")
# the keys of a run's recipe that decide what is sampled and how it is computed
USED_TOPICS = ("weights and adapter", "noise", "data", "rewards", "tools and environments", "rollouts")
USED_KEYS = {key for topic in USED_TOPICS for key in TOPICS[topic]}
USED_KEYS |= {"max_steps", "pack_tokens", "per_device_train_batch_size", "gradient_accumulation_steps"}
USED_KEYS |= {"bf16", "fp16", "tf32", "seed", "use_cpu"}
# TRL derives generation_batch_size from other keys; the adapter comes from the run, whatever the run started from
USED_KEYS -= {"generation_batch_size", "adapter_name_or_path"}
USED_KEYS -= {"rollout_func"}  # it is not called
USED_KEYS -= {"vllm_mode", *SERVER_KEYS}  # parts can be switched only in an engine in this process
OVERRIDES = {"report_to": "none", "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}


class Sizes(NamedTuple):
    """Hold the size of |delta| in nats: mean, 99th percentile and maximum."""

    mean: float
    p99: float
    largest: float

    @staticmethod
    def of(delta: torch.Tensor) -> "Sizes":
        size = delta.abs().double()
        return Sizes(float(size.mean()), float(size.quantile(0.99)), float(size.max()))


@dataclass(frozen=True)
class Part:
    """One row of the table: ``stage`` measures delta with this part on, ``added`` what the part adds to delta.

    ``ratio``, of adapter and noise alone, is the part's effect in the engine over that in the trainer.
    """

    name: str
    stage: Sizes
    added: Sizes
    ratio: float | None = None
    ratio_error: float | None = None


@dataclass(frozen=True)
class Mismatch:
    """Hold the result for ``tokens``, with noise of ``sigma`` (0: none); ``cut`` names keys that narrow sampling."""

    parts: tuple[Part, ...]
    tokens: int
    sigma: float
    cut: tuple[str, ...]


def run(folder: Path, flags: Sequence[str] = (), problems: int = 16) -> int:
    """Measure the run (or adapter) in ``folder``, print the table and return 0; ``flags`` override its recipe."""
    if problems < 1:
        raise ValueError(f"problems is {problems}; it must be at least 1")
    saved = open_adapter(folder)
    from qerl_recipes.train import preflight
    from qerl_recipes.train import run as training_run

    with tempfile.TemporaryDirectory() as scratch:
        script, training, model = _recipe(saved, flags, Path(scratch))
        if training.rollout_engine != "vllm":
            raise ConfigError(f"rollout_engine: {training.rollout_engine}: only vllm's parts can be switched off")
        if training.vllm_mode == SERVER:
            raise ConfigError("vllm_mode: server: the parts are switched off in an engine of this process; remove it")
        if training.quantization != "qerl_nvfp4" and training.use_cpu:
            raise ConfigError(
                f"quantization: {training.quantization}: vLLM's LoRA slots on a CPU cannot give the "
                "log-probabilities of given tokens; measure this format on a GPU, or qerl_nvfp4 here"
            )
        checked = preflight.make(script, training, model)
        saved.check_base(checked.run.base_hash)
        trainer = training_run.build(checked)
        try:
            result = measure(trainer, saved, problems, checked.interaction)
            available = len(trainer.train_dataset)
        finally:
            trainer.vllm_generation.close()
    lines = [_reading(result, training)]
    if checked.interaction.has_calls():
        lines.append("These are the first turns of episodes; logp_diff of metrics.jsonl has all turns in it.")
    if saved.recipe.get("rollout_func"):
        lines.append("rollout_func renders prompts itself; here the trainer has rendered them, each is answered once.")
    if available < problems:
        few = f"The training set has {available} problems, fewer than the {problems} asked for"
        lines.append(f"{few}: this is of those {available}.")
    console = Console()
    console.print(table(result, f"{saved.path}: {training.quantization}, noise_mode {training.noise_mode}"))
    console.print("\n".join(lines), markup=False, highlight=False)
    return 0


def measure(
    trainer: "QerlGRPOTrainer", saved: AdapterFolder, problems: int, interaction: Interaction = prompts.WITHOUT_CALLS
) -> Mismatch:
    """Sample from ``saved`` on the first ``problems`` of the training set, and compare engine and trainer.

    A new ``trainer`` takes over adapter and norms of ``saved``. The noise is that of rollout 0 with ``sigma_start``.
    """
    rows = trainer.train_dataset.select(range(min(problems, len(trainer.train_dataset))))
    sides, training = _Sides(trainer, saved, _first_turns(trainer, list(rows), interaction)), trainer.args
    sigma = 0.0 if training.noise_mode == "none" else float(training.sigma_start or 0.0)
    sampled, temperature = sides.sample(sigma), trainer.temperature
    states = [(False, 0.0), (True, 0.0), *([(True, sigma)] if sigma else [])]
    engine_logps = [sides.engine(adapted, noise) for adapted, noise in states]
    trainer_logps = [sides.trainer(adapted, noise, 1.0) for adapted, noise in states]
    if not sigma:
        engine_logps, trainer_logps = [*engine_logps, engine_logps[-1]], [*trainer_logps, trainer_logps[-1]]
    engine_logps.append(sampled)
    trainer_logps.append(sides.trainer(True, sigma, temperature))
    deltas = [t - e for t, e in zip(trainer_logps, engine_logps, strict=True)]
    parts = []
    for i, name in enumerate(STAGES):
        added = deltas[i] - deltas[i - 1] if i else deltas[i]
        ratio: tuple[float, float] | tuple[()] = ()
        if name in ("adapter", "noise"):
            of_engine, of_trainer = (logps[i] - logps[i - 1] for logps in (engine_logps, trainer_logps))
            ratio = _ratio(of_engine, of_trainer, [*map(len, sides.completions)])
        parts.append(Part(name, Sizes.of(deltas[i]), Sizes.of(added), *ratio))
    return Mismatch(tuple(parts), len(sampled), sigma, tuple(narrowing(training)))


def _first_turns(trainer: "QerlGRPOTrainer", rows: list[dict[str, Any]], interaction: Interaction) -> list[list[int]]:
    """Return the tokens that the engine gets for each of ``rows`` in the run, for the first turn of its episode."""
    tokenizer: Any = trainer.processing_class
    options, factories = rendering(tokenizer, trainer.args, interaction), interaction.environments
    rows = trainer.starts.seeded(rows, interaction.resets(), 0, 1)
    tokens = []
    for row in rows:
        name = row[COLUMN] if factories and None not in factories else None
        prompt = row["prompt"]
        if factories:
            prompt = begun(row, factories[name](), is_one_of_several=name is not None)
        tokens.append(prompts.ids(prompt, tokenizer, {**options, "tools": interaction.schemas(name)}))
    return tokens


class _Sides:
    """Run engine and trainer on the same tokens; every result is (tokens,) fp32, in the same order."""

    def __init__(self, trainer: "QerlGRPOTrainer", saved: AdapterFolder, prompts: list[list[int]]) -> None:
        self._trainer = trainer
        self._policy = trainer.accelerator.unwrap_model(trainer.model).eval()
        self._base = {name: norm.weight.detach().clone() for name, norm in norms.named_norms(self._policy)}
        load_adapter(self._policy, saved.path)
        self._trained = {name: norm.weight.detach().clone() for name, norm in norms.named_norms(self._policy)}
        self._prompts = prompts
        self.completions: list[list[int]] = []

    def sample(self, sigma: float) -> torch.Tensor:
        """Draw a completion of each prompt as the run does; return the log-probabilities they were drawn with."""
        engine: Any = self._trainer.vllm_generation
        engine.begin(0, sigma or None)
        _, drawn, logprobs, _ = engine.generate(self._prompts, None, 1)
        # scoring needs room for one more token
        longest = engine.llm.llm_engine.model_config.max_model_len - 1
        self.completions = [ids[: longest - len(p)] for p, ids in zip(self._prompts, drawn, strict=True)]
        if not any(self.completions):
            raise ValueError("no prompt has left room for a completion; raise vllm_max_model_length")
        kept = [value for c, of in zip(self.completions, logprobs, strict=True) for (value,) in of[: len(c)]]
        return torch.tensor([float("nan") if value is None else value for value in kept])

    def engine(self, adapted: bool, sigma: float) -> torch.Tensor:
        engine: Any = self._trainer.vllm_generation
        if adapted:
            engine.begin(0, sigma or None)
        else:
            engine.serve_base()
        return torch.tensor([value for of in engine.score(self._prompts, self.completions) for value in of])

    @torch.no_grad()
    def trainer(self, adapted: bool, sigma: float, temperature: float) -> torch.Tensor:
        trainer, policy, args = self._trainer, self._policy, self._trainer.args
        for name, norm in norms.named_norms(policy):
            norm.weight.copy_((self._trained if adapted else self._base)[name])
        norms.clear_noise(policy)
        if sigma and args.noise_mode == "both":
            assert args.noise_seed is not None  # GRPOConfig settles it
            norms.set_noise(policy, sigma, args.noise_seed, 0, args.noise_targets)
        before, trainer.temperature = trainer.temperature, temperature
        size = args.per_device_train_batch_size
        pairs = list(zip(self._prompts, self.completions, strict=True))
        logps_per_batch = []
        try:
            with nullcontext() if adapted else policy.disable_adapter():
                for first in range(0, len(pairs), size):
                    ids, mask, width = _padded(pairs[first : first + size], trainer)
                    logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
                    logps_per_batch.append(logps[mask[:, -width:].bool()].float().cpu())
        finally:
            trainer.temperature = before
        return torch.cat(logps_per_batch)


def _recipe(saved: AdapterFolder, flags: Sequence[str], scratch: Path) -> tuple[Any, GRPOConfig, Any]:
    if not saved.recipe:
        raise ValueError(f"{saved.path} does not say by which recipe it was trained; name a run of qerl train")
    keys = USED_KEYS
    if saved.recipe.get("noise_mode") == "none":  # its sigmas of 0 would contradict flags that ask for noise
        keys = keys - {"sigma_start", "sigma_end", "num_stages"}
    content = {key: value for key, value in saved.recipe.items() if key in keys and value is not None}
    content |= {**OVERRIDES, "output_dir": str(scratch / "run")}
    file = scratch / "recipe.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return parse(["--config", str(file), *flags])


def _padded(
    pairs: Sequence[tuple[list[int], list[int]]], trainer: "QerlGRPOTrainer"
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pad prompts on the left and completions on the right, as TRL does; return ids and mask (B, P + C), and C."""
    parts = []
    for side, sequences in zip(("left", "right"), zip(*pairs, strict=True), strict=True):
        rows = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
        masks = pad([torch.ones_like(row) for row in rows], padding_side=side)
        parts.append((pad(rows, trainer._tokenizer.pad_token_id, side), masks))
    ids, mask = (torch.cat(of_both, dim=1).to(trainer.accelerator.device) for of_both in zip(*parts, strict=True))
    return ids, mask, parts[1][0].shape[1]


def _ratio(
    of_engine: torch.Tensor, of_trainer: torch.Tensor, lengths: Sequence[int]
) -> tuple[float, float] | tuple[()]:
    """Fit a line through zero with errors on both sides; return its slope and standard error, or () without a slope.

    Ordinary least squares takes one side as exact, and would find a correct adapter a few per cent too weak. The error
    is a jackknife over completions (``lengths``), within which tokens depend on each other. Sources: W. E. Deming,
    Statistical Adjustment of Data (1943); B. Efron, The Jackknife, the Bootstrap and Other Resampling Plans (1982),
    chapter 3.
    """
    y, x = of_engine.double(), of_trainer.double()
    of_tokens = torch.stack((x * x, y * y, x * y), dim=1)
    sums = torch.stack([of.sum(dim=0) for of in of_tokens.split(list(lengths))])  # (completions, 3)
    whole, count = sums.sum(dim=0), len(sums)
    ratio = _slope(*whole.tolist())
    if ratio is None:
        return ()
    without = [_slope(*rest) for rest in (whole - sums).tolist()]
    if count < 2 or None in without:
        return ratio, math.nan
    return ratio, (count - 1) / math.sqrt(count) * float(torch.tensor(without, dtype=torch.float64).std())


def _slope(xx: float, yy: float, xy: float) -> float | None:
    """Return the line's slope from the sums of squares and products; None if the sum of products is 0."""
    return (yy - xx + math.hypot(yy - xx, 2 * xy)) / (2 * xy) if xy else None


def table(result: Mismatch, title: str) -> Table:
    """Return the table for the terminal."""
    # without rules between columns and with two-line headers every word fits into 80 columns
    view = Table(
        title=f"{title}, {result.tokens} tokens", title_justify="left", box=box.SIMPLE, show_edge=False, padding=0
    )
    view.add_column("parts on", overflow="fold")
    for column in ("mean\n|delta|", "p99", "max", "it adds:\nmean", "p99", "max", "engine /\ntrainer"):
        view.add_column(column, justify="right", overflow="fold")
    for i, part in enumerate(result.parts):
        ratio = "" if part.ratio is None else f"{part.ratio:.4f} ± {part.ratio_error:.4f}"
        numbers = (f"{number:.3g}" for number in (*part.stage, *part.added))
        view.add_row(("+ " if i else "") + part.name, *numbers, ratio)
    return view


def _reading(result: Mismatch, training: GRPOConfig) -> str:
    """Explain what the rows measure in this run, and which differences are in them on purpose."""
    mode, sigma = str(training.noise_mode), f"sigma {result.sigma:g}"
    known = {"none": "none in this run", "both": f"{sigma} on both sides"}
    lines = [
        "delta: log p of the trainer minus that of the engine, in nats, on tokens that the engine has sampled. A row "
        "has its part and those above it on.",
        "weights: the base alone, one pass, temperature 1; adapter: with trained norms, if any; noise: "
        f"{known.get(mode, f'{sigma} in the engine alone, as {mode} is')}; sampling: token by token, temperature "
        f"{training.temperature:g}, as logp_diff.",
    ]
    if result.cut:
        lines.append(
            f"sampling is cut by {', '.join(result.cut)}: the engine's log-probabilities are of what is left "
            "(processed_logprobs), the trainer's of the whole, and the row has that difference in it."
        )
    return "\n".join(lines)
