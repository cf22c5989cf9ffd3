"""Settings that vLLM needs on a CPU, before anything imports it, and tiny checkpoints that every test may use."""

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from qerl_recipes.environment import prepare

prepare()  # before anything imports vllm
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Make = Callable[..., Path]
ENGINES_OWN = {"MASTER_PORT", "VLLM_DIST_IDENT"}  # variables that hold for the engines of one process alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with integration tests first: with two workers, none of them should be what the other waits for."""
    count = Counter(item.path for item in items if item.get_closest_marker("integration"))
    items.sort(key=lambda item: -count[item.path])


@pytest.fixture(scope="session")
def make_bf16(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make_bf16("qwen2", **config) -> folder of a random BF16 checkpoint of that architecture with a tokenizer.

    Norm weights are random: with ones, a norm that is skipped or rounded twice would go unnoticed.
    """
    import torch
    import transformers

    from qerl_recipes.running_sum import tokenizer

    made: dict[str, Path] = {}

    def make(architecture: str, **changes: object) -> Path:
        key = json.dumps([architecture, changes], sort_keys=True)
        if key in made:
            return made[key]
        sizes: dict[str, object] = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral", "qwen3_moe": "Qwen3Moe"}
        if architecture == "qwen2":
            del sizes["head_dim"]
            sizes["num_attention_heads"] = 2
        if architecture == "qwen3_moe":
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = getattr(transformers, name[architecture] + "Config")(**{**sizes, **changes})
        torch.manual_seed(7)
        model = getattr(transformers, name[architecture] + "ForCausalLM")(config).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "norm" in parameter_name:
                    parameter.copy_(1 + 0.3 * noise)
                elif parameter_name.endswith("bias"):
                    parameter.copy_(0.5 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 1.5)
        folder = tmp_path_factory.mktemp(architecture) / "bf16"
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        made[key] = folder
        return folder

    return make


@pytest.fixture(scope="session")
def make_nvfp4(make_bf16: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make_nvfp4("qwen2", **config) -> folder of the same checkpoint, quantized."""
    from qerl_recipes.quantize import quantize_checkpoint

    def make(architecture: str, **changes: object) -> Path:
        source = make_bf16(architecture, **changes)
        destination = source.parent / "nvfp4"
        if not destination.exists():
            quantize_checkpoint(source, destination)
        return destination

    return make


@pytest.fixture(scope="session")
def engine_options() -> dict[str, object]:
    """What every test engine on a CPU is started with."""
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "disable_log_stats": True,
        "seed": 0,
    }


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start_process(command, log, **environment) -> the process; with the test it ends, and all that it has started.

    Its output goes to the file ``log``; ``environment`` is added to that of the tests, less what is their engines'.
    """
    started = []

    def start(command: Sequence[str | Path], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name not in ENGINES_OWN}
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env={**inherited, **environment}, start_new_session=True
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def run_process(start_process: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., None]:
    """run_process(command, log, seconds=280, **environment) runs it to its end, which must be a good one."""

    def run(command: Sequence[str | Path], log: Path, seconds: float = 280, **environment: str) -> None:
        process = start_process(command, log, **environment)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        assert process.returncode == 0, log.read_text()[-6000:]

    return run
