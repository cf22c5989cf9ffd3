"""Read a study's plan from its YAML file, and list the runs that it asks for.

recipes/studies/qwen2.5_1.5b_gsm8k.yaml shows most keys, and smollm2_pick.yaml there what stands under ``afterwards``.

An arm is the recipe with keys of its own; nothing else differs between arms. Its key ``trainer`` is no key of a recipe:
``trl`` has TRL's own trainer train the adapter, ``trl_all_weights`` all weights without one.

With ``sweep``, every arm is first trained at each value with the sweep's seeds, and judged by the primary evaluation
alone. Then each arm runs with all seeds at its best value, and at ``common`` where that is given. The base of an arm is
judged once, with the first seed. A study without a sweep may take arms that another study has run:

    taken: {study: recipes/studies/other.yaml, arms: {none: nvfp4_lora@0.0001}}
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qerl_recipes.files.metrics_file import requested_name
from qerl_recipes.files.run_state import LAST, MODEL
from qerl_recipes.recipe.file import ConfigError, UniqueKeyLoader, flags, read_yaml, up_to_date

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
OWN_KEYS = ("seed", "output_dir", "resume_from_checkpoint")  # the study sets these in every run
# who trains an arm, by its key TRAINER -> the words of the command
TRAINER, OURS, ALL_WEIGHTS = "trainer", "qerl", "trl_all_weights"
TRAINERS = {OURS: ("train",), "trl": ("train-stock-trl",), ALL_WEIGHTS: ("train-stock-trl", "--all-weights")}
SWEEP_GAIN = "sweep_gain"  # a claim's metric: the accuracy at the largest value of the sweep less that at the smallest
SHARES = ("accuracy", SWEEP_GAIN, "in_upper_state")  # metrics, from 0 to 1
Kind = Literal["sweep", "best", "common"]  # of a run
Seeds = Annotated[list[int], Field(min_length=1)]
Metric = Annotated[str, BeforeValidator(requested_name)]
Keys = Annotated[dict[str, Any], AfterValidator(lambda keys: up_to_date(keys, "arms"))]


class StudyError(ValueError):
    """Report a study that cannot be run or read; the message names the key and the way out."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sweep(_Strict):
    """Try one key of the recipe at each of ``values`` in every arm, with ``seeds`` of its own."""

    key: Annotated[str, AfterValidator(lambda key: next(iter(up_to_date({key: None}, "sweep.key"))))]
    values: Annotated[list[float], Field(min_length=2)]
    seeds: Seeds
    common: float | None = None


class Claim(_Strict):
    """State a claim about two arms, and what would show it, before the runs.

    The first arm of ``pair`` is expected to have a ``metric`` that is "higher", "lower" or "not lower" than the
    second's. An effect below ``margin``, in the metric's own unit, does not matter.
    """

    claim: str
    pair: tuple[str, str]
    expect: Literal["higher", "lower", "not lower"]
    margin: Annotated[float, Field(gt=0)]
    metric: Metric = "accuracy"

    @model_validator(mode="after")
    def _is_within_a_share(self) -> "Claim":
        if self.metric in SHARES and self.margin >= 1:
            raise ValueError(f"margin is {self.margin:g}, and {self.metric} is a share; 0.01 is one point of 100")
        return self


class Look(Claim):
    """State a claim that was made once the results were known.

    ``also`` maps an arm to {another study's file: its label in that table}. Those runs count as this arm's, too: a seed
    that both have counts with its mean, and further seeds are added.
    """

    also: dict[str, dict[Path, str]] = {}


class Plot(_Strict):
    """Choose what the plot of a page shows: by default every arm's reward and entropy over the steps."""

    arms: list[str] = []
    metrics: list[Metric] = []


class Afterwards(_Strict):
    """Hold what was added once the results were known; pages show it as such, and no run depends on it.

    In ``answer``, {arm} becomes the arm's accuracy, {base arm} that before training, {gain of arm} by how much training
    raised it, {a - b} the difference of two arms, and {claim: TEXT} that of a claim. ``two_states`` is an accuracy
    between two states in which runs end; arms are then compared by how many end above it. ``untested`` maps a claim to
    the reason.
    """

    answer: str = ""
    plot: Plot = Plot()
    claims: list[Look] = []
    two_states: Annotated[float, Field(gt=0, lt=1)] | None = None
    untested: dict[str, str] = {}


class Taken(_Strict):
    """Take arms whose runs are in the table of another ``study`` file: arm -> its label in that table."""

    study: Path
    arms: Annotated[dict[str, str], Field(min_length=1)]


class Study(_Strict):
    """Hold a study file; ``recipe`` is relative to the current folder."""

    recipe: Path
    arms: dict[str, Keys]
    seeds: Seeds
    evaluations: dict[str, dict[str, Any]]
    primary: str
    sweep: Sweep | None = None
    taken: Taken | None = None
    comparisons: list[tuple[str, str]] = []
    claims: list[Claim] = []
    target_reward: float | None = None
    about: str = ""
    question: str = ""
    afterwards: Afterwards = Afterwards()

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        for name in (*self.arms, *self.evaluations):
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} becomes a folder's name: use letters, digits, '_', '.', '+' and '-'")
        if len(self.arms) < 2:
            raise ValueError("arms: a study compares at least two")
        if self.primary not in self.evaluations:
            raise ValueError(f"primary: {self.primary!r} is not one of the evaluations {', '.join(self.evaluations)}")
        for arm, keys in self.arms.items():
            if own := sorted(set(keys) & {*OWN_KEYS, *([self.sweep.key] if self.sweep else [])}):
                raise ValueError(f"arms.{arm}: {', '.join(own)} is set by the study itself; remove it")
            if (trainer := keys.get(TRAINER, OURS)) not in TRAINERS:
                raise ValueError(f"arms.{arm}: trainer is {trainer!r}; it is one of {', '.join(TRAINERS)}")
            if null := sorted(key for key, value in keys.items() if value is None):
                way_out = "take it out of the recipe, and set it in each arm that has it"
                raise ValueError(f"arms.{arm}: {', '.join(null)} is null, which cannot override a key; {way_out}")
        self._check_arms_named()
        unique: dict[str, list[Any]] = {"seeds": self.seeds, "comparisons": self.comparisons}
        if self.sweep:
            unique |= {"sweep.seeds": self.sweep.seeds, "sweep.values": [f"{value:g}" for value in self.sweep.values]}
            self._check_sweep(self.sweep)
        for key, values in unique.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{key}: each may stand there once (of a number, the first six digits count)")
        return self

    def _check_arms_named(self) -> None:
        looks = self.afterwards.claims
        pairs = {
            "comparisons": self.comparisons,
            "claims": [claim.pair for claim in self.claims],
            "afterwards.claims": [look.pair for look in looks],
        }
        named = {key: list(itertools.chain(*of)) for key, of in pairs.items()}
        named |= {"afterwards.plot": self.afterwards.plot.arms, "taken.arms": list(self.taken_arms)}
        for key, names in named.items():
            if unknown := [name for name in names if name not in self.arms]:
                raise ValueError(f"{key}: {unknown[0]!r} is not one of the arms {', '.join(self.arms)}")
        for key, of in pairs.items():
            if alike := [a for a, b in of if a == b]:
                raise ValueError(f"{key}: {alike[0]} is compared with itself")
        for look in looks:
            if unpaired := sorted(look.also.keys() - set(look.pair)):
                raise ValueError(f"afterwards.claims: also names {', '.join(unpaired)}, which its pair has not")
        if self.sweep is None and any(claim.metric == SWEEP_GAIN for claim in (*self.claims, *looks)):
            raise ValueError(f"claims: the metric {SWEEP_GAIN} needs a sweep")

    def _check_sweep(self, sweep: Sweep) -> None:
        if self.taken:
            raise ValueError("taken: the arms of a study with a sweep are all run; remove one or the other")
        if sweep.key in OWN_KEYS:
            raise ValueError(f"sweep.key: {sweep.key} is set by the study itself; sweep another key")
        if set(sweep.seeds) & set(self.seeds):
            raise ValueError("sweep.seeds: the best value must not be chosen on the seeds that are compared")
        if sweep.common is not None and sweep.common not in sweep.values:
            raise ValueError(f"sweep.common: {sweep.common} is not one of the values of the sweep")

    @property
    def taken_arms(self) -> dict[str, str]:
        """Return the arms that are taken from another study, with their labels there."""
        return self.taken.arms if self.taken else {}

    @property
    def own_arms(self) -> dict[str, dict[str, Any]]:
        return {arm: keys for arm, keys in self.arms.items() if arm not in self.taken_arms}

    def evaluations_of(self, run: "Run") -> dict[str, dict[str, Any]]:
        return {self.primary: self.evaluations[self.primary]} if run.kind == "sweep" else self.evaluations

    def settled(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's keys under ``keys``; raise StudyError if its file is no YAML or no mapping."""
        try:
            content = read_yaml(self.recipe)
        except ConfigError as error:
            raise StudyError(str(error)) from error
        return {**content, **keys}

    def decided(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return those keys, without the ones that the study sets itself."""
        return {name: value for name, value in self.settled(keys).items() if name not in OWN_KEYS}


class Run(_Strict):
    """Describe one training with its evaluations: ``keys`` over the recipe's; ``kind`` says what it is for."""

    arm: str
    seed: int
    value: float | None
    kind: Kind
    keys: dict[str, Any]

    @property
    def label(self) -> str:
        """Return the arm's name in results, which with a sweep ends in @VALUE."""
        return self.arm if self.value is None else f"{self.arm}@{self.value:g}"

    @property
    def folder(self) -> str:
        """Return its folder, below the study's own; a run that serves two purposes is one run."""
        return f"{self.label}/seed-{self.seed}"

    @property
    def trainer(self) -> str:
        """Return who trains it, one of ``TRAINERS``."""
        return str(self.keys.get(TRAINER, OURS))

    @property
    def flags(self) -> list[str]:
        """Return its keys, with its seed, as flags of the command that trains it."""
        return flags({**{key: value for key, value in self.keys.items() if key != TRAINER}, "seed": self.seed})

    @property
    def trained(self) -> str:
        """Return the subfolder with what it has trained: an adapter, or a whole model."""
        return MODEL if self.trainer == ALL_WEIGHTS else LAST


def read(path: Path) -> Study:
    """Read the study in a YAML file; raise StudyError for a key that is unknown, missing or does not fit the others."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except FileNotFoundError as error:
        raise StudyError(f"there is no study file {path}") from error
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is no YAML: {error}") from error
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise StudyError(f"{path}: " + "; ".join(lines)) from error
    if not study.recipe.is_file():
        raise StudyError(f"{path}: recipe {study.recipe} does not exist; name it from the folder you are in")
    for arm, keys in study.arms.items():
        model = study.settled(keys).get("model_name_or_path")
        if not (isinstance(model, str) and model):
            raise StudyError(f"{path}: arms.{arm} has no model_name_or_path, nor has {study.recipe}; name it there")
    return study


def first_runs(study: Study) -> list[Run]:
    """Return the runs that need no result of others: those of the sweep, or all where there is none."""
    if study.sweep is None:
        return [run_of(study, arm, seed) for seed in study.seeds for arm in study.own_arms]
    swept = itertools.product(study.sweep.seeds, study.sweep.values, study.arms)
    return [run_of(study, arm, seed, value, "sweep") for seed, value, arm in swept]


def later_runs(study: Study, best: Mapping[str, float]) -> list[Run]:
    """Return the compared runs of a study with a sweep; ``best`` maps an arm to its value of the sweep's key."""
    wanted = [run_of(study, arm, seed, value) for seed in study.seeds for arm, value in best.items()]
    if study.sweep and (common := study.sweep.common) is not None:
        wanted += [run_of(study, a, s, common, "common") for s in study.seeds for a, v in best.items() if v != common]
    return wanted


def possible_runs(study: Study) -> dict[tuple[str, int], Run]:
    """Return (label, seed) -> run for every run that the study may come to, whichever values are the best."""
    runs = first_runs(study)
    if study.sweep is not None:
        pairs = itertools.product(study.seeds, study.sweep.values, study.arms)
        runs += [run_of(study, arm, seed, value) for seed, value, arm in pairs]
    return {(run.label, run.seed): run for run in runs}


def best_values(study: Study, accuracies: Mapping[tuple[str, int, float], float]) -> dict[str, float]:
    """Return the value with the highest mean accuracy for each arm that has all, and of equals the smallest."""
    assert study.sweep is not None
    seeds = study.sweep.seeds

    def mean(arm: str, value: float) -> float:
        # rounded, so that equal means are equal whatever the order of the sum
        return round(sum(accuracies[arm, seed, value] for seed in seeds) / len(seeds), 5)

    whole = [arm for arm in study.arms if all((arm, s, v) in accuracies for s in seeds for v in study.sweep.values)]
    return {arm: max(sorted(study.sweep.values), key=lambda value: mean(arm, value)) for arm in whole}


def run_of(study: Study, arm: str, seed: int, value: float | None = None, kind: Kind = "best") -> Run:
    """Return the run of an arm with a seed, at a ``value`` of the sweep's key if there is a sweep."""
    swept = {study.sweep.key: value} if study.sweep else {}
    return Run(arm=arm, seed=seed, value=value, kind=kind, keys={**study.arms[arm], **swept})
