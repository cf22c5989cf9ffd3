"""Test what a run tells the trackers of ``report_to``, with the real packages and without a network.

wandb and trackio are not in requirements-cpu.lock: `pip install wandb trackio` first, in an environment of one's own.
"""

import importlib.util
import json
import os
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import digit_rewards
import pytest

from qerl_recipes.machine import processes

NAMES = ("tensorboard", "wandb", "trackio")
Told = tuple[dict[str, Any], dict[str, list[float]], list[dict[str, Any]]]  # config, figures, rows of the tables
pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def run(write_recipe_in: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps with all trackers that are installed, and return the folder that everything lies in."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = write_recipe_in(
        folder,
        reward_funcs=["digit_rewards.digits"],
        report_to=[name for name in NAMES if importlib.util.find_spec(name)],
        max_steps=2,
        log_completions=True,
        noise_mode="both",
        sigma_start=0.1,
        num_stages=1,
        run_name="a run",
        project="a project",
        wandb_project="a project",
        wandb_run_group="a group",
    )
    (folder / "wandb_files").mkdir()
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder / "wandb_files")}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    path = [str(Path(digit_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    line = [sys.executable, "-m", "qerl_recipes.cli", "train", "--config", recipe]
    assert processes.run(line, log=folder / "log", environment=environment) == 0, (folder / "log").read_text()[-6000:]
    return folder


def tensorboard(folder: Path) -> Told:
    """Read the event file; TRL gives this tracker no table."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    figures = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    (config,) = events.Tensors("args/text_summary")
    return json.loads(config.tensor_proto.string_val[0]), figures, []


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which wandb writes: blocks of 32 KiB, records in pieces."""
    content, position, whole = file.read_bytes(), 7, b""  # after wandb's own header
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole, or its last piece
            yield whole
            whole = b""


def wandb(folder: Path) -> Told:
    """Read the run that would be uploaded, and its tables."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb_files/wandb/offline-run-*/run-*.wandb")
    config: dict[str, Any] = {}
    figures: dict[str, list[float]] = {}
    named = set()
    for content in records(file):
        record = Record()
        record.ParseFromString(content)
        for update in (record.run.config.update, record.config.update):
            config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update}
        if record.run.project:
            named.add((record.run.project, record.run.run_group, record.run.display_name))
        for item in record.history.item:
            figures.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert named == {("a project", "a group", "a run")}
    rows = []
    for table in sorted(file.parent.rglob("*.table.json")):
        content = json.loads(table.read_text())
        rows += [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    return config, figures, rows


def trackio(folder: Path) -> Told:
    """Read the project's database."""
    (file,) = (folder / "trackio").glob("*.db")
    figures: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    with sqlite3.connect(file) as database:
        (config,) = database.execute("SELECT config FROM configs WHERE run_name = 'a run'").fetchone()
        for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(text).items():
                if name == "completions":
                    rows += value["_value"]
                else:
                    figures.setdefault(name, []).append(value)
    return json.loads(config), figures, rows


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_is_told_config_figures_and_completions(
    name: str, run: Path, read_metrics: Callable[[Any], list[dict[str, Any]]]
) -> None:
    pytest.importorskip(name)
    config, figures, rows = globals()[name](run)
    assert (config["sigma_start"], config["lr_scheduler_type"], config["max_steps"]) == (0.1, "linear", 2)
    lines = read_metrics(run / "run")
    assert lines[0]["reward"] != lines[1]["reward"] and lines[0]["grad_norm"] > 0
    for told, ours in {"reward": "reward", "grad_norm": "grad_norm", "sigma": "sigma", "loss": "loss"}.items():
        wanted = [line[ours] for line in lines]
        assert figures[f"train/{told}"][: len(lines)] == pytest.approx(wanted, rel=1e-3, abs=1e-4), told
    assert {"train/completions/mean_length", "train/frac_reward_zero_std", "train/learning_rate"} <= figures.keys()
    if name != "tensorboard":
        assert {row["step"] for row in rows} == {1, 2}
        assert {"prompt", "completion", "digits", "advantage"} <= rows[0].keys()
        assert sum(row["step"] == 1 for row in rows) == 8
