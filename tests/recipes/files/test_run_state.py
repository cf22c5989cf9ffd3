"""Test which folders are checkpoints of a run, which one it resumes from, and what must not have changed."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import AdapterFolder
from qerl_recipes.files.run_state import CheckpointMismatch, State

STATE = State("org/base", "0" * 64, "qerl_nvfp4", False, 1, 2, "rows", 3, 3, 0, 3, recipe={"beta": 0.0}, processes=2)


def checkpoint(run: Path, step: int, name: str | None = None) -> Path:
    folder = run / (name or f"checkpoint-{step}")
    (folder / "inner").mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 10)
    (folder / "inner" / "weights.bin").write_bytes(b"x" * 10)
    run_state.write_state(folder, replace(STATE, step=step))
    return folder


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "inner/weights.bin"])
@pytest.mark.parametrize(
    ("size", "said"), [(9, "has 9 of 10"), (11, "has 11 of 10"), (None, "is missing; it had of 10")]
)
def test_a_checkpoint_with_a_file_of_another_size_is_none(
    file: str, size: int | None, said: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, 2)
    assert run_state.read_state(folder).step == 2
    (folder / file).unlink() if size is None else (folder / file).write_bytes(b"x" * size)
    with pytest.raises(CheckpointMismatch, match=f"{file} {said} bytes"):
        run_state.starting_point(tmp_path / "another", str(folder))
    assert run_state.whole_checkpoints(tmp_path) == []


def test_a_state_under_former_names_continues(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder, recipe = (
        checkpoint(tmp_path, 2),
        {"skip_silent_rows": True, "checkpointed_layers": 3, "noise_mode": "shared"},
    )
    file = folder / "qerl_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "recipe": recipe}))
    state = run_state.read_state(folder)
    now = {"skip_zero_advantage": True, "recompute_layers": 3, "noise_mode": "both"}
    assert state.recipe == AdapterFolder(folder, {}, {"recipe": recipe}).recipe == now
    run_state.check_recipe(state, {**now, "recompute_layers": 5}, folder)
    with pytest.raises(CheckpointMismatch, match="skip_zero_advantage was true and is false"):
        run_state.check_recipe(state, {**now, "skip_zero_advantage": False}, folder)
    assert not recwarn


@pytest.mark.parametrize("content", ["[]", "null", '{"step": 1}', "{", '"x"'])
def test_a_damaged_state_is_named_and_passed_over(content: str, tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    (second / "qerl_state.json").write_text(content)
    with pytest.raises(CheckpointMismatch, match=r"checkpoint-4/qerl_state\.json is damaged"):
        run_state.read_state(second)
    assert run_state.starting_point(tmp_path, True) == first


def test_a_run_goes_on_from_its_last_step(tmp_path: Path) -> None:
    """Check that steps are compared as numbers: checkpoint-10 is later than checkpoint-9."""
    checkpoint(tmp_path, 99, "checkpoint-99-of-mine")
    folders = [checkpoint(tmp_path, step) for step in (10, 9, 8)]
    for asked in (True, "true", "True"):
        assert run_state.starting_point(tmp_path, asked) == folders[0]
    assert run_state.starting_point(tmp_path, str(folders[2])) == folders[2]
    with pytest.raises(CheckpointMismatch, match="holds checkpoint-10 of an earlier run"):
        run_state.starting_point(tmp_path, None)
    assert f"nothing up to {folders[0]} is lost" in run_state.what_is_kept(tmp_path)
    for keep_all in (None, 0, 3):
        run_state.rotate(tmp_path, keep_all)
        assert run_state.whole_checkpoints(tmp_path) == folders[::-1]
    run_state.rotate(tmp_path, 2)
    assert run_state.whole_checkpoints(tmp_path) == [folders[1], folders[0]]
    run_state.rotate(tmp_path, 1)
    assert run_state.whole_checkpoints(tmp_path) == [folders[0]]
    assert (tmp_path / "checkpoint-99-of-mine").is_dir()


def contents(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in [*run.glob("[!.]*"), *run.glob("_left-*/*")])


def test_what_is_later_than_a_resume_is_moved_away(tmp_path: Path) -> None:
    for step in (2, 4, 6, 10):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 10, "adapter")
    (tmp_path / "metrics.jsonl").write_text("of ten steps")
    history = tmp_path / "metrics.jsonl"
    assert run_state.leave_later(tmp_path, 10, history) is None
    assert run_state.leave_later(tmp_path, 4, history) == tmp_path / "_left-1"
    assert run_state.starting_point(tmp_path, True) == tmp_path / "checkpoint-4"
    left = [f"_left-1/{name}" for name in ("adapter", "checkpoint-10", "checkpoint-6", "metrics.jsonl")]
    assert contents(tmp_path) == ["_left-1", *left, "checkpoint-2", "checkpoint-4", "metrics.jsonl"]
    assert run_state.read_state(tmp_path / "_left-1" / "checkpoint-10").step == 10
    assert (tmp_path / "_left-1" / "metrics.jsonl").read_text() == history.read_text() == "of ten steps"
    assert run_state.leave_later(tmp_path, 2) == tmp_path / "_left-2"
    assert run_state.whole_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize("kill", range(10))
def test_going_back_is_done_or_not_wherever_it_is_killed(
    kill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 6, "adapter")
    changes = iter(range(kill))

    def until_killed(change: Callable[..., None]) -> Callable[..., None]:
        def or_killed(*arguments: object, **options: object) -> None:
            if next(changes, None) is None:
                raise KeyboardInterrupt
            change(*arguments, **options)

        return or_killed

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, until_killed(getattr(os, name)))
        run_state.leave_later(tmp_path, 2)
    is_done = (tmp_path / "_left-1").exists()
    before = [tmp_path / f"checkpoint-{step}" for step in ((2,) if is_done else (2, 4, 6))]
    assert is_done == (kill > 2) and run_state.whole_checkpoints(tmp_path) == before
    assert run_state.starting_point(tmp_path, True) == before[-1]
    run_state.leave_later(tmp_path, 2)  # the next start does this too
    left = [f"_left-1/{name}" for name in ("adapter", "checkpoint-4", "checkpoint-6")]
    assert contents(tmp_path) == ["_left-1", *left, "checkpoint-2"]


def test_a_checkpoint_from_elsewhere_is_not_mixed_in(tmp_path: Path) -> None:
    run, other = tmp_path / "run", checkpoint(tmp_path / "other", 2)
    assert run_state.starting_point(run, str(other)) == other
    checkpoint(run, 8)
    with pytest.raises(
        CheckpointMismatch, match=r"other/checkpoint-2 lies elsewhere, and .*run holds checkpoint-8 of a"
    ):
        run_state.starting_point(run, str(other))


def test_a_new_run_begins_where_none_is(tmp_path: Path) -> None:
    assert run_state.starting_point(tmp_path, None) is None
    with pytest.raises(CheckpointMismatch, match="holds no whole checkpoint"):
        run_state.starting_point(tmp_path, True)
    assert run_state.what_is_kept(tmp_path) == f"{tmp_path} holds no checkpoint yet: start again"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_hash": "1" * 64}, r"another base \(org/base\)"),
        ({"quantization": "bf16"}, "its run had quantization: qerl_nvfp4"),
        ({"train_norms": True}, "its run had train_norms: false"),
        ({"seed": 7}, "its run had seed: 1"),
        ({"noise_seed": 7}, "its run had noise_seed: 2"),
        ({"dataset": "others"}, "other training data"),
        ({"processes": 1}, "its run had 2 trainer processes and this one has 1; .*--num_processes 2"),
    ],
)
def test_another_run_is_not_continued(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointMismatch, match=f"cannot resume from run: .*{said}.*use adapter_name_or_path"):
        run_state.check_continues(STATE, replace(STATE, **change), "run")


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            "a" * 64,
            "",
            "the adapter of SHA-256 aaaaaaaaaaaa, and would with the base; name that one as adapter_name_or",
        ),
        (
            "a" * 64,
            "b" * 64,
            "the adapter of SHA-256 aaaaaaaaaaaa, and would with the adapter of SHA-256 bbbbbbbbbbbb; name",
        ),
        ("", "b" * 64, "the base, and would with the adapter of SHA-256 bbbbbbbbbbbb; leave adapter_name_or_path out"),
        ("a" * 64, "a" * 64, None),
        (None, "a" * 64, None),
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_reference_that_it_had(was: str | None, now: str, said: str | None) -> None:
    before, after = replace(STATE, reference=was), replace(STATE, reference=now)
    with contextlib.nullcontext() if said is None else pytest.raises(CheckpointMismatch, match=f"policy with {said}"):
        run_state.check_continues(before, after, "run")


def test_a_run_continues_under_another_name_of_its_base() -> None:
    run_state.check_continues(STATE, replace(STATE, base="/moved"), "run")
    run_state.check_continues(replace(STATE, processes=None), STATE, "run")


def test_a_run_is_described_by_its_own_keys(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "1"}])
    training = SimpleNamespace(quantization="bf16", train_norms=True, seed=5, noise_seed=6, world_size=4, beta=0.0)
    (tmp_path / "config.json").write_text("{}")
    base = tmp_path
    found = run_state.describe(training, base, rows, "org/base")
    assert (found.base, found.base_hash, found.quantization) == ("org/base", run_state.base_hash(base), "bf16")
    assert (found.train_norms, found.seed, found.noise_seed, found.processes) == (True, 5, 6, 4)
    assert found.dataset == run_state.dataset_hash(rows)
    assert run_state.describe(training, base, rows).base == str(base)
    assert run_state.describe(training, base, rows, start="hash").reference is None
    training.beta = 0.1
    assert run_state.describe(training, base, rows).reference == ""
    assert run_state.describe(training, base, rows, start="hash").reference == "hash"


def test_the_hash_of_training_data_is_of_its_rows_in_their_order() -> None:
    rows = [{"prompt": str(i), "answer": str(-i)} for i in range(1001)]  # more rows than are read at once
    expected = run_state.dataset_hash(Dataset.from_list(rows))
    assert run_state.dataset_hash(Dataset.from_list([*rows, rows[0]]).select(range(1001))) == expected
    swapped = [*rows[:-2], rows[-1], rows[-2]]
    renamed = [{"prompt": row["prompt"], "solution": row["answer"]} for row in rows]
    last = [*rows[:-1], {**rows[-1], "answer": "0"}]
    for other in (swapped, renamed, last, rows[:-1], rows[::-1]):
        assert run_state.dataset_hash(Dataset.from_list(other)) != expected


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 4)
    found = run_state.read_state(folder)
    assert replace(found, date="", versions={}, files={}) == replace(STATE, step=4)
    assert found.files == {"adapter_model.safetensors": 10, "inner/weights.bin": 10}
    assert found.versions["torch"] and found.date.endswith("+00:00")
    content = json.loads((folder / "qerl_state.json").read_text())
    (folder / "qerl_state.json").write_text(json.dumps({**content, "of_a_later_release": 1}))
    assert run_state.read_state(folder) == found
    for name in ("recipe", "date", "seconds"):  # a state of an earlier release has no such entries
        del content[name]
    (folder / "qerl_state.json").write_text(json.dumps(content))
    assert run_state.read_state(folder).recipe == {}
    del content["stream"]
    (folder / "qerl_state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointMismatch, match=r"damaged \(KeyError\('stream'\)"):
        run_state.read_state(folder)
