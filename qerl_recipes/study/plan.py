"""What a study consists of: read from its YAML file, checked whole before the first run.

    recipe: recipes/SmolLM2-135M-Instruct/grpo/nvfp4_lora.yaml
    arms:
      bf16_lora: {quantization: bf16}
      nvfp4_lora: {quantization: qerl_nvfp4}
    seeds: [0, 1, 2, 3, 4]
    sweep: {key: learning_rate, values: [3.0e-5, 1.0e-4, 3.0e-4], seeds: [100, 101], common: 1.0e-4}
    evaluations:
      greedy: {tasks: "jsonl:held_out.jsonl", max_new_tokens: 256}
    primary: greedy
    comparisons: [[nvfp4_lora, bf16_lora]]
    claims:
    - {claim: noise adds accuracy, pair: [nvfp4_noise, nvfp4_lora], expect: higher, margin: 0.01}
    target_reward: 0.5

    afterwards: {two_states: 0.75}

What stands under ``afterwards`` was added once the results were known, and is shown as such; the rest is the plan.
An arm is the recipe with keys of its own; nothing else differs between arms. A study without a sweep may take arms from
another one's table, whose runs would be the same:

    taken: {study: recipes/studies/other.yaml, arms: {none: nvfp4_lora@0.0001}}

With ``sweep`` every arm is first trained at each value with the sweep's seeds, and judged by the primary evaluation
alone. Then each arm runs with all seeds at its own best value (by the mean of the primary accuracy), as soon as that is
known, and, where ``common`` is given, at that one too. The base of an arm is judged once, with the first seed: it does
not depend on the training.
"""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qerl_recipes.recipe.file import ConfigError, UniqueKeyLoader, read_yaml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# what a study sets itself, in every run
OWN_KEYS = ("seed", "output_dir", "resume_from_checkpoint")
SWEEP_GAIN = "sweep_gain"  # a claim's metric: what an arm gains between the smallest and the largest value of the sweep
Seeds = Annotated[list[int], Field(min_length=1)]


class StudyError(ValueError):
    """A study file that cannot be run; the message names the key and the way out."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sweep(_Strict):
    """One key of the recipe, tried at each of ``values`` in every arm with ``seeds`` of its own."""

    key: str
    values: Annotated[list[float], Field(min_length=2)]
    seeds: Seeds
    common: float | None = None


class Claim(_Strict):
    """Something said of two arms, and what would show it, written down before the runs.

    ``pair``: the first arm's ``metric`` is ``expect``: "higher" or "lower" than the second's, or "not lower". An effect
    below ``margin``, in the metric's own unit, does not matter. Metrics are those of the table; ``sweep_gain`` is the
    primary accuracy at the sweep's largest value less that at its smallest, over the sweep's seeds.
    """

    claim: str
    pair: tuple[str, str]
    expect: Literal["higher", "lower", "not lower"]
    margin: Annotated[float, Field(gt=0)]
    metric: str = "accuracy"


class Look(Claim):
    """A claim made once the results were known. ``also``: an arm -> {another study's file: its label in that table},
    whose runs count as this arm's, too: by seed their mean, and further seeds beside those of the study."""

    also: dict[str, dict[Path, str]] = {}


class Afterwards(_Strict):
    """What was added once the results were known. It is shown as such, and decides no run.

    ``two_states``: an accuracy that lies between two states in which runs end; arms are then compared by how many of
    their runs end above it. ``untested``: what is said elsewhere -> why no run of the study tests it.
    """

    claims: list[Look] = []
    two_states: float | None = None
    untested: dict[str, str] = {}


class Taken(_Strict):
    """Arms whose runs are there already, in the table of another ``study`` file: arm -> its label in that table."""

    study: Path
    arms: Annotated[dict[str, str], Field(min_length=1)]


class Study(_Strict):
    """A study file; see the module. ``recipe`` is relative to the folder the command is typed in."""

    recipe: Path
    arms: dict[str, dict[str, Any]]
    seeds: Seeds
    evaluations: dict[str, dict[str, Any]]
    primary: str
    sweep: Sweep | None = None
    taken: Taken | None = None
    comparisons: list[tuple[str, str]] = []
    claims: list[Claim] = []
    target_reward: float | None = None
    about: str = ""
    afterwards: Afterwards = Afterwards()

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        for name in (*self.arms, *self.evaluations):
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} becomes a folder's name: use letters, digits, '_', '.', '+' and '-'")
        if len(self.arms) < 2:
            raise ValueError("arms: a study compares at least two")
        for arm, keys in self.arms.items():
            if taken := sorted(set(keys) & {*OWN_KEYS, *([self.sweep.key] if self.sweep else [])}):
                raise ValueError(f"arms.{arm}: {', '.join(taken)} is set by the study itself; remove it")
            if absent := sorted(key for key, value in keys.items() if value is None):
                raise ValueError(
                    f"arms.{arm}: {', '.join(absent)} is null, which no flag can say: the recipe's would hold. Take it "
                    "out of the recipe, and give it to the arms that have it"
                )
        compared = {
            "comparisons": self.comparisons,
            "claims": [claim.pair for claim in self.claims],
            "afterwards": [look.pair for look in self.afterwards.claims],
        }
        for key, pairs in compared.items():
            for name in itertools.chain(*pairs):
                if name not in self.arms:
                    raise ValueError(f"{key}: {name!r} is not one of the arms {', '.join(self.arms)}")
            if alike := [a for a, b in pairs if a == b]:
                raise ValueError(f"{key}: {alike[0]} is compared with itself")
        for look in self.afterwards.claims:
            if strange := sorted(look.also.keys() - set(look.pair)):
                raise ValueError(f"afterwards.claims: also names {', '.join(strange)}, which its pair has not")
        if len(set(self.comparisons)) < len(self.comparisons):
            raise ValueError("comparisons: each may stand there once")
        if self.sweep is None and any(claim.metric == SWEEP_GAIN for claim in (*self.claims, *self.afterwards.claims)):
            raise ValueError(f"claims: the metric {SWEEP_GAIN} needs a sweep")
        if self.primary not in self.evaluations:
            raise ValueError(f"primary: {self.primary!r} is not one of the evaluations {', '.join(self.evaluations)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each may stand there once")
        if self.taken:
            if unknown := sorted(set(self.taken.arms) - set(self.arms)):
                raise ValueError(f"taken.arms: {', '.join(unknown)} is not one of the arms {', '.join(self.arms)}")
            if self.sweep:
                raise ValueError("taken: the arms of a study with a sweep are all run; remove one or the other")
        if self.sweep:
            if self.sweep.key in OWN_KEYS:
                raise ValueError(f"sweep.key: {self.sweep.key} is set by the study itself; sweep another key")
            if len({f"{value:g}" for value in self.sweep.values}) < len(self.sweep.values):
                raise ValueError("sweep.values: each may stand there once, and they differ in their first six digits")
            if len(set(self.sweep.seeds)) < len(self.sweep.seeds):
                raise ValueError("sweep.seeds: each may stand there once")
            if set(self.sweep.seeds) & set(self.seeds):
                raise ValueError("sweep.seeds: the best value must not be chosen on the seeds that are compared")
            if self.sweep.common is not None and self.sweep.common not in self.sweep.values:
                raise ValueError(f"sweep.common: {self.sweep.common} is not one of the values of the sweep")
        return self

    @property
    def taken_arms(self) -> dict[str, str]:
        """Those that are another study's -> their labels there."""
        return self.taken.arms if self.taken else {}

    @property
    def own_arms(self) -> dict[str, dict[str, Any]]:
        """Those that are run for this study."""
        return {arm: keys for arm, keys in self.arms.items() if arm not in self.taken_arms}

    def evaluations_of(self, run: "Run") -> dict[str, dict[str, Any]]:
        """The evaluations that follow a run."""
        return {self.primary: self.evaluations[self.primary]} if run.kind == "sweep" else self.evaluations

    def settled(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a training: those of the recipe's file, and ``keys``, an arm's or a run's, over them. Raises
        StudyError for a file that is no YAML, or no mapping."""
        try:
            content = read_yaml(self.recipe)
        except ConfigError as error:
            raise StudyError(str(error)) from error
        return {**content, **keys}

    def decided(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Of those keys the ones that the study does not set itself."""
        return {name: value for name, value in self.settled(keys).items() if name not in OWN_KEYS}

    def judges_base(self, run: "Run") -> bool:
        """Whether a run's evaluations judge its base too."""
        return run.kind != "sweep" and run.seed == self.seeds[0]


class Run(_Strict):
    """One training with its evaluations: ``keys`` over the recipe's. ``kind`` says what it is for."""

    arm: str
    seed: int
    value: float | None
    kind: Literal["sweep", "best", "common"]
    keys: dict[str, Any]

    @property
    def label(self) -> str:
        """The arm's name in results: with the value of the sweep's key, where there is a sweep."""
        return self.arm if self.value is None else f"{self.arm}@{self.value:g}"

    @property
    def folder(self) -> str:
        """Where it lies, below the study's own folder. A run that serves two purposes is one run."""
        return f"{self.label}/seed-{self.seed}"


def read(path: Path) -> Study:
    """The study in a YAML file. Raises StudyError for a key that is unknown, missing or does not fit the others."""
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
            raise StudyError(
                f"{path}: arms.{arm} has no model_name_or_path, nor has {study.recipe}; name the model there"
            )
    return study


def first_runs(study: Study) -> list[Run]:
    """The runs that need no result of others: the sweep's, or all of its own arms' where there is none."""
    if study.sweep is None:
        return [
            Run(arm=arm, seed=seed, value=None, kind="best", keys=keys)
            for seed in study.seeds
            for arm, keys in study.own_arms.items()
        ]
    return [
        _swept(study, arm, seed, value, "sweep")
        for seed in study.sweep.seeds
        for value in study.sweep.values
        for arm in study.arms
    ]


def later_runs(study: Study, best: Mapping[str, float]) -> list[Run]:
    """The compared runs of the arms in ``best``, arm -> value of the sweep's key; none where there is no sweep."""
    if study.sweep is None:
        return []
    wanted = [_swept(study, arm, seed, value, "best") for seed in study.seeds for arm, value in best.items()]
    if (common := study.sweep.common) is not None:
        wanted += [_swept(study, a, s, common, "common") for s in study.seeds for a, v in best.items() if v != common]
    return wanted


def possible_runs(study: Study) -> dict[tuple[str, int], Run]:
    """(label, seed) -> run, of every run that the study asks for or may come to, whichever values are the best."""
    runs = first_runs(study)
    if study.sweep is not None:
        pairs = itertools.product(study.seeds, study.sweep.values, study.arms)
        runs += [_swept(study, arm, seed, value, "best") for seed, value, arm in pairs]
    return {(run.label, run.seed): run for run in runs}


def best_values(study: Study, accuracies: Mapping[tuple[str, int, float], float]) -> dict[str, float]:
    """Arm -> the value with the highest mean of the primary accuracy over the sweep's seeds; the smaller one of equals.

    ``accuracies``: (arm, seed, value) -> accuracy of the finished runs of the sweep. Arms that lack one are left out.
    """
    assert study.sweep is not None
    seeds = study.sweep.seeds

    def mean(arm: str, value: float) -> float:
        # equal ones are equal whatever the order of the sum, and in a table of six digits
        return round(sum(accuracies[arm, seed, value] for seed in seeds) / len(seeds), 5)

    whole = [arm for arm in study.arms if all((arm, s, v) in accuracies for s in seeds for v in study.sweep.values)]
    return {arm: max(sorted(study.sweep.values), key=lambda value: mean(arm, value)) for arm in whole}


def _swept(study: Study, arm: str, seed: int, value: float, kind: Literal["sweep", "best", "common"]) -> Run:
    assert study.sweep is not None
    return Run(arm=arm, seed=seed, value=value, kind=kind, keys={**study.arms[arm], study.sweep.key: value})


def flags(keys: dict[str, Any]) -> list[str]:
    """Keys of a recipe as flags of the command line."""
    flags: list[str] = []
    for name, value in keys.items():
        if isinstance(value, bool):
            flags += [f"--{name}", str(value).lower()]
        elif isinstance(value, list):
            flags += [f"--{name}", *(json.dumps(one) if isinstance(one, dict | bool) else str(one) for one in value)]
        elif isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags
