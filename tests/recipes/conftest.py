"""Provide recipes, trainers, adapters and servers on tiny checkpoints, and shut their engines down after the test."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calling
import pytest
import torch
import yaml
from digit_rewards import digits

SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "learning_rate": 1e-2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "max_completion_length": 12,
    "vllm_max_model_length": 64,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
}


@pytest.fixture(scope="session")
def write_recipe_in(make_nvfp4: Callable[..., Path], light_engines: None) -> Callable[..., str]:
    """Return write_recipe_in(folder, **changes), which writes a recipe of SETTINGS and returns its path.

    The recipe trains a tiny checkpoint and has output_dir folder/run.
    """

    def write(folder: Path, **changes: Any) -> str:
        recipe = {
            "model_name_or_path": str(make_nvfp4("qwen2")),
            "output_dir": str(folder / "run"),
            "lora_r": 4,
            "lora_alpha": 8,
            "lora_target_modules": ["all-linear"],
            "dataset_name": "running_sum",
            "dataset_size": 16,
            "reward_funcs": ["running_sum_format"],
            **SETTINGS,
            **changes,
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return str(path)

    return write


@pytest.fixture
def write_recipe(write_recipe_in: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """Return write_recipe(**changes), which is write_recipe_in with the test's own folder."""
    return functools.partial(write_recipe_in, tmp_path)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write local files with the schema of a recipe's data and of the demo's model, and return their paths."""
    from qerl_recipes.convert.quantize import quantization_config
    from qerl_recipes.recipe.shapes import config_json

    folder = tmp_path_factory.mktemp("stand_ins")
    gsm8k, big_math = folder / "gsm8k.jsonl", folder / "big_math.jsonl"
    gsm8k.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(80)))
    big_math.write_text("".join(json.dumps({"prompt": f"{i}?", "solution": f"{i}"}) + "\n" for i in range(80)))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 256}))
    packed = folder / "packed"
    packed.mkdir()
    config = {**config_json("30B-A3B"), "quantization_config": quantization_config(["lm_head"])}
    (packed / "config.json").write_text(json.dumps(config))
    return {"gsm8k": gsm8k, "bigmath": big_math, "model": model, "packed": packed}


@pytest.fixture
def make_trainer(tmp_path: Path, light_engines: None) -> Iterator[Callable[..., Any]]:
    """Return a function that builds a QerlGRPOTrainer and shuts its engine down after the test.

    Its parameters are (base, reward=digits, rows=16, rank=4, adapter=None, dtype, change, attention, targets, turns,
    **settings). ``reward`` may be a list of rewards. ``change`` is called with the loaded model. ``targets`` are the
    modules that carry the adapter. ``turns`` are arguments of the trainer, such as tools; with them the prompts are
    conversations, and the tokenizer that of ``calling``.
    """
    with trainers(tmp_path / "run") as make:
        yield make


@pytest.fixture(scope="module")
def make_module_trainer(tmp_path_factory: pytest.TempPathFactory, light_engines: None) -> Iterator[Callable[..., Any]]:
    """Return a make_trainer of module scope, for a run that several tests look at."""
    with trainers(tmp_path_factory.mktemp("module") / "run") as make:
        yield make


@contextlib.contextmanager
def trainers(output: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes trainers, one engine at a time, which write into ``output`` by default."""
    from peft import LoraConfig

    from qerl_recipes.files.adapter import open_adapter
    from qerl_recipes.files.run_state import describe
    from qerl_recipes.model import loading
    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_recipes.tasks import running_sum
    from qerl_recipes.train.run import assemble
    from qerl_recipes.train.trainer import QerlGRPOTrainer

    made: list[Any] = []

    def close() -> None:
        while made:
            made.pop().close()

    def make(
        base: Path,
        reward: Any = digits,
        rows: int = 16,
        rank: int = 4,
        adapter: Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[Any], None] | None = None,
        attention: str | None = None,
        targets: str | list[str] = "all-linear",
        turns: dict[str, Any] | None = None,
        **settings: Any,
    ) -> QerlGRPOTrainer:
        close()
        args = GRPOConfig(**{"output_dir": str(output), "share_weights": False, **SETTINGS, **settings})
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        load = loading.load

        def changed(*arguments: Any, **options: Any) -> Any:
            model = load(*arguments, **options)
            if change is not None:
                change(model)
            return model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "load", changed)
            problems = running_sum.training_set if turns is None else calling.prompts
            data = problems(rows, 0)
            start_hash = None if adapter is None else open_adapter(adapter).sha256()
            tokenizer = running_sum.tokenizer() if turns is None else calling.tokenizer()
            arguments = {"train_dataset": data, "processing_class": tokenizer, **(turns or {})}
            trainer = assemble(
                args,
                base,
                adapter=lora if adapter is None else LoraConfig.from_pretrained(str(adapter)),
                start=adapter,
                dtype=dtype,
                attn_implementation=attention,
                reward_funcs=reward if isinstance(reward, list) else [reward],
                run=describe(args, base, data, start=start_hash),
                eval_dataset=problems(4, 1) if args.eval_strategy != "no" else None,
                **arguments,
            )
        made.append(trainer.vllm_generation)
        return trainer

    try:
        yield make
    finally:
        close()


@pytest.fixture
def resume() -> Callable[..., None]:
    """Return resume(trainer, checkpoint=True), which trains on from a checkpoint as `qerl train` does.

    True means the last one in the run's folder.
    """
    from qerl_recipes.files.run_state import recorded
    from qerl_recipes.train.preflight import resume_point

    def go_on(trainer: Any, checkpoint: Path | bool = True) -> None:
        trainer.args.resume_from_checkpoint = checkpoint
        trainer.train(resume_point(trainer.args, recorded(trainer.args)))

    return go_on


@pytest.fixture
def train_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return train_main(*flags), which trains as the command does and shuts the engine down afterwards."""
    from qerl_recipes.train import run

    built, build = [], run.build
    monkeypatch.setattr(run, "build", lambda *arguments: built.append(build(*arguments)) or built[-1])

    def call(*flags: str) -> None:
        try:
            run.main(flags)
        finally:
            while built:
                built.pop().vllm_generation.close()

    return call


@pytest.fixture(scope="session")
def evaluation_tasks() -> Any:
    """Return the module that imports lighteval, which takes 4 s that only some workers need."""
    from qerl_recipes.evaluate import tasks

    return tasks


@pytest.fixture
def read_metrics() -> Callable[[Any], list[dict[str, Any]]]:
    """Return read_metrics(trainer or folder), which returns the lines of metrics.jsonl.

    It leaves out the speeds, because no two runs share them.
    """

    def read(source: Any) -> list[dict[str, Any]]:
        folder = Path(source if isinstance(source, str | Path) else source.args.output_dir)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        clock = ("_tokens_per_s", "step_seconds", "tool_seconds")
        return [{k: v for k, v in record.items() if not k.endswith(clock)} for record in records]

    return read


@pytest.fixture(scope="session")
def save_adapter() -> Callable[..., Path]:
    """Return save_adapter(folder, seed, scale=1.0, **state), which saves a random LoRA and returns its folder.

    The adapter has rank 4, fits the tiny Qwen2, lies on q_proj and down_proj, and changes most answers. ``state``
    becomes qerl_state.json.
    """
    from safetensors.torch import save_file

    def save(folder: Path, seed: int, scale: float = 1.0, **state: object) -> Path:
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            for module, inputs, outputs in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 96, 64)):
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = scale * torch.randn(4, inputs, generator=generator)
                tensors[f"{name}.lora_B.weight"] = scale * torch.randn(outputs, 4, generator=generator)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if state:
            (folder / "qerl_state.json").write_text(json.dumps(state))
        return folder

    return save


class Piece:
    """Fake one piece of memory that is all KV cache, and record when it is released and taken again."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def caches(self) -> list[tuple[int, int]]:
        return [(4096, 64)]

    allocations = caches

    def unmap(self, address: int) -> None:
        self._events.append("release")

    def map(self, address: int) -> None:
        self._events.append("resume")

    def clear_caches(self) -> None:
        self._events.append("zero")

    def free_bytes(self) -> int:
        return 64


@pytest.fixture
def kv_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let engines on a CPU pretend to release a KV cache, and return the list of what they did, in order."""
    from qerl_vllm_plugin.compat import kv_cache_memory

    events: list[str] = []
    monkeypatch.setattr(kv_cache_memory, "KVCacheMemory", lambda worker: Piece(events))
    return events


TOKEN = "an-admin-token-of-32-characters!"


@pytest.fixture
def scripted() -> Iterator[None]:
    """Register the scripted rollout engine in this process, so that a recipe can name it."""
    import scripted_rollouts

    from qerl_recipes.hooks import get_plugin_manager

    manager = get_plugin_manager()
    manager.register(scripted_rollouts)
    yield
    manager.unregister(scripted_rollouts)


@pytest.fixture
def admin_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the admin token of the servers of ``serve_policy``."""
    monkeypatch.setenv("QERL_ADMIN_TOKEN", TOKEN)
    monkeypatch.delenv("QERL_ADMIN_TOKEN_FILE", raising=False)


@pytest.fixture(scope="package")
def serve_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return serve_policy(model, port, *options, rank=4, **environment), which starts a server with /v1/qerl.

    It returns the process, which ends with all tests of recipes; the log is at ``process.log``. A trainer that uses
    the server needs ``admin_token``.
    """
    import subprocess

    from qerl_recipes.machine import processes
    from qerl_recipes.machine.serve import command

    started: list[subprocess.Popen[bytes]] = []
    folder = tmp_path_factory.mktemp("servers")

    def start(model: Path, port: int, *options: str, rank: int = 4, **environment: str) -> subprocess.Popen[bytes]:
        line = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "64"]
        line += ["--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--no-enable-chunked-prefill"]
        line += ["--logprobs-mode", "processed_logprobs"]
        line += ["--additional-config", json.dumps({"qerl": {"policy_adapter": {"rank": rank}}})]
        # The engine runs in the server's process: see tests/plugin/over_http/conftest.py.
        ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "qerl", "QERL_ADMIN_TOKEN": TOKEN}
        ours["FORK_ENGINES"] = "1"  # tests/fixtures/processes
        log = folder / f"{len(started)}.log"
        process = processes.start(command(str(model), [*line, *options]), log, {**ours, **environment})
        process.log = log  # type: ignore[attr-defined]
        started.append(process)
        return process

    yield start
    for process in started:
        processes.end(process)
